"""Floats to MXFP4 under all four scale rules; reference: formats.mxfp4.quantize_mxfp4.

bfloat16 is handled two elements a word from end to end. Adding a power of two whose last bit
weighs one step of the code's octave rounds to nearest even; taking it off again and multiplying
by 2^-126 leaves the code in the lowest exponent bits and first mantissa bit.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.mx import E2M1_ELEMENT, MX_BLOCK_SIZE, ScaleRounding
from k3quant.kernels import bf16_pairs
from k3quant.kernels.rounding import nearest_code, to_float32

_BLOCKS = 128
_WARPS = 4


def quantize_mxfp4(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to MXFP4.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 32.
        rounding: Rule for the scale byte.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble; `[..., cols / 32]` uint8 scale
        bytes; and an int32 scalar that is 1 when a value is NaN or infinite, and the rest is then
        undefined.

    Raises:
        SchemaError: The columns are no multiple of 32.
    """
    *lead, cols = weight.shape
    if cols % MX_BLOCK_SIZE:
        raise SchemaError(f"columns: expected a multiple of {MX_BLOCK_SIZE}, got {cols}")
    weight = weight.contiguous()
    blocks = weight.numel() // MX_BLOCK_SIZE
    packed = torch.empty((*lead, cols // 2), dtype=torch.uint8, device=weight.device)
    grid_shape = (*lead, cols // MX_BLOCK_SIZE)
    scale_e8m0 = torch.empty(grid_shape, dtype=torch.uint8, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    if blocks:
        pairs = weight.dtype == torch.bfloat16
        kernel = _quantize_pairs_kernel if pairs else _quantize_floats_kernel
        kernel[(triton.cdiv(blocks, _BLOCKS),)](
            weight.view(torch.int32) if pairs else weight,
            packed,
            scale_e8m0,
            fault,
            blocks,
            STEP=E2M1_ELEMENT.round_up_step(rounding, 7 if pairs else 23),
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return packed, scale_e8m0, fault


@triton.jit
def _quantize_pairs_kernel(
    words_ptr,
    packed_ptr,
    scale_ptr,
    fault_ptr,
    blocks,
    STEP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    # Four words a thread are the widest load there is, 16 bytes.
    offsets = tl.max_contiguous(block[:, None] * 16 + tl.arange(0, 16)[None, :], [1, 4])
    words = tl.load(words_ptr + start * 16 + offsets, mask=live[:, None], other=0)
    words = words.to(tl.uint32, bitcast=True)
    magnitude = words & 0x7FFF7FFF
    largest = tl.reduce(magnitude, 1, bf16_pairs.larger)
    amax = tl.maximum(largest >> 16, largest & 0xFFFF)
    scale = tl.minimum(tl.maximum((amax + STEP) >> 7, 2), 254) - 2
    inverse = (254 - scale) * 0x00800080  # 2^(127 - scale) twice

    scaled = bf16_pairs.multiply(magnitude, inverse[:, None])
    scaled = bf16_pairs.smaller(scaled, tl.full((1, 1), 0x40C040C0, tl.uint32))  # 6
    leading = bf16_pairs.larger(scaled, tl.full((1, 1), 0x3F803F80, tl.uint32)) & 0x7F807F80
    ruler, back = tl.full((1, 1), 0x42804280, tl.uint32), tl.full((1, 1), 0xC280C280, tl.uint32)
    rounded = bf16_pairs.multiply_add(leading, ruler, scaled)
    rounded = bf16_pairs.multiply_add(leading, back, rounded)
    codes = bf16_pairs.multiply(rounded, tl.full((1, 1), 0x00800080, tl.uint32))  # 2^-126
    codes |= (words >> 6) & 0x02000200
    # The product moves both nibbles, at bits 6 and 22, to the highest byte.
    packed = (codes * 0x40040) >> 24

    tl.store(packed_ptr + start * 16 + offsets, packed.to(tl.uint8), mask=live[:, None])
    tl.store(scale_ptr + start + block, scale.to(tl.uint8), mask=live)
    flag = fault_ptr + tl.zeros((BLOCKS,), tl.int32)
    tl.store(flag, 1, mask=live & (amax >= 0x7F80))


@triton.jit
def _quantize_floats_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    fault_ptr,
    blocks,
    STEP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    offsets = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    weight = to_float32(tl.load(weight_ptr + start * 32 + offsets, mask=live[:, None], other=0))
    bits = weight.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, axis=1)
    scale = tl.minimum(tl.maximum((amax + STEP) >> 23, 2), 254) - 2
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)

    scaled = tl.minimum(tl.abs(weight) * inverse[:, None], 6.0)
    codes = nearest_code(scaled, MANTISSA_BITS=1, MIN_EXPONENT=0) | ((bits >> 28) & 8)
    low, high = tl.split(tl.reshape(codes, (BLOCKS, 16, 2)))

    offsets = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(packed_ptr + start * 16 + offsets, packed, mask=live[:, None])
    tl.store(scale_ptr + start + block, scale.to(tl.uint8), mask=live)
    flag = fault_ptr + tl.zeros((BLOCKS,), tl.int32)
    tl.store(flag, 1, mask=live & (amax >= 0x7F800000))
