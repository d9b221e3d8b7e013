"""Floats to MXFP8 under all four scale rules; reference: formats.mxfp8.quantize_mxfp8."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.mx import E4M3_ELEMENT, MX_BLOCK_SIZE, ScaleRounding
from k3quant.kernels.float_pairs import are_words, largest_of_rows, load_pairs
from k3quant.kernels.rounding import encode_e4m3_pair

_BLOCKS = 64
_WARPS = 4


def quantize_mxfp8(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to MXFP8.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 32.
        rounding: Rule for the scale byte.

    Returns:
        `[..., cols]` uint8 E4M3 bytes; `[..., cols / 32]` uint8 scale bytes; and an int32 scalar
        that is 1 when a value is NaN or infinite, and the rest is then undefined.

    Raises:
        SchemaError: The columns are no multiple of 32.
    """
    *lead, cols = weight.shape
    if cols % MX_BLOCK_SIZE:
        raise SchemaError(f"columns: expected a multiple of {MX_BLOCK_SIZE}, got {cols}")
    weight = weight.contiguous()
    blocks = weight.numel() // MX_BLOCK_SIZE
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    grid_shape = (*lead, cols // MX_BLOCK_SIZE)
    scale_e8m0 = torch.empty(grid_shape, dtype=torch.uint8, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    if blocks:
        words = are_words(weight)
        _quantize_mxfp8_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            weight.view(torch.int32) if words else weight,
            codes.view(torch.int16),
            scale_e8m0,
            fault,
            blocks,
            STEP=E4M3_ELEMENT.round_up_step(rounding, 23),
            LARGEST=E4M3_ELEMENT.max_scale,
            WORDS=words,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return codes, scale_e8m0, fault


@triton.jit
def _quantize_mxfp8_kernel(
    weight_ptr,
    codes_ptr,
    scale_ptr,
    fault_ptr,
    blocks,
    STEP: tl.constexpr,
    LARGEST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    weight_ptr += start * (16 if WORDS else 32)
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    # Four words a thread are the widest load there is, 16 bytes.
    pair = tl.max_contiguous(block[:, None] * 16 + tl.arange(0, 16)[None, :], [1, 4])
    place = pair if WORDS else 2 * pair
    first, second, _, magnitude = load_pairs(weight_ptr, place, live[:, None], live[:, None], WORDS)
    bits = largest_of_rows(magnitude, WORDS)
    scale = tl.minimum(tl.maximum((bits + STEP) >> 23, 8) - 8, LARGEST)
    # 2^(127 - scale): products with it are exact, or far below what rounds to zero.
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = encode_e4m3_pair(first * inverse, second * inverse).to(tl.int16, bitcast=True)
    tl.store(codes_ptr + start * 16 + pair, codes, mask=live[:, None])
    tl.store(scale_ptr + start + block, scale.to(tl.uint8), mask=live)
    flag = fault_ptr + tl.zeros((BLOCKS,), tl.int32)
    tl.store(flag, 1, mask=live & (bits >= 0x7F800000))
