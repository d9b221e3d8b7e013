"""MXFP4 to bfloat16, float16 or float32; reference: formats.mxfp4.dequantize_mxfp4.

A packed byte becomes one 32-bit word of two bfloat16. The three bits under a nibble's sign, put
where bfloat16 has its lowest exponent bits and first mantissa bit, are the code's value times
2^-126, subnormal included, so two exact products finish it for every code and scale byte.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.kernels import bf16_pairs

# The smallest scale byte under which a code may overflow.
_SUSPECT = {torch.float32: 253, torch.bfloat16: 253, torch.float16: 141}
_BLOCKS = 64
_WARPS = 4


def dequantize_mxfp4(
    packed: Tensor,
    scale_e8m0: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute code * 2^(scale - 127), a batch of experts in one launch.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.
        dtype: bfloat16, float16 or float32.
        experts: `[n]` indices into the first dimension, any order, repeats allowed; None takes
            all of it.
        out: `[..., cols]` in `dtype`, contiguous, to fill; None allocates.

    Returns:
        `[..., cols]` in `dtype`, the first dimension n where `experts` was given; and an int32
        scalar that is 1 when a scale byte is NaN or so large that a code may have overflowed.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    parts, blocks = 1, scale_e8m0.numel()
    if experts is not None:
        shape = (len(experts), *shape[1:])
        parts, blocks = len(experts), blocks // max(1, packed.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    suspect = torch.zeros((), dtype=torch.int32, device=packed.device)
    if parts * blocks:
        grid = (triton.cdiv(blocks, _BLOCKS), parts)
        _dequantize_mxfp4_kernel[grid](
            packed,
            scale_e8m0,
            packed if experts is None else experts,
            out if dtype == torch.float32 else out.view(torch.int32),
            suspect,
            blocks,
            SUSPECT=_SUSPECT[dtype],
            GATHER=experts is not None,
            BITS=dtype.itemsize * 8,
            HALF=dtype == torch.float16,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return out, suspect


@triton.jit
def scale_pair(scale_e8m0):
    """Return a word of twice the bfloat16 2^(scale - 127); byte 0 is subnormal, 255 is NaN.

    Args:
        scale_e8m0: Any shape, uint32 holding one byte.
    """
    bits = tl.where(scale_e8m0 == 0, 0x40, scale_e8m0 << 7)
    return tl.where(scale_e8m0 == 255, 0x7FC0, bits) * 0x10001


@triton.jit
def decode_pair(packed, scale):
    """Return words of two bfloat16, the low nibble's value in the low half.

    Args:
        packed: Any shape, uint32 holding one byte.
        scale: What `scale_pair` gives, of a shape that broadcasts.
    """
    small = ((packed * 0x40040) & 0x01C001C0) | ((packed * 0x1001000) & 0x80008000)
    values = bf16_pairs.multiply(small, tl.full(packed.shape, 0x7E807E80, tl.uint32))  # 2^126
    return bf16_pairs.multiply(values, scale)


@triton.jit
def _dequantize_mxfp4_kernel(
    packed_ptr,
    scale_ptr,
    experts_ptr,
    out_ptr,
    suspect_ptr,
    blocks,
    SUSPECT: tl.constexpr,
    GATHER: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    target = tl.program_id(1).to(tl.int64)
    source = target
    if GATHER:
        source = tl.load(experts_ptr + target).to(tl.int64)
    packed_ptr += (source * blocks + start) * 16
    scale_ptr += source * blocks + start
    out_ptr += (target * blocks + start) * (BITS if BITS == 32 else 16)
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    # Four bytes a thread become the widest store there is, 16 bytes.
    offsets = tl.max_contiguous(block[:, None] * 16 + tl.arange(0, 16)[None, :], [1, 4])
    packed = tl.load(packed_ptr + offsets, mask=live[:, None], other=0).to(tl.uint32)
    scale = tl.load(scale_ptr + block, mask=live, other=0).to(tl.uint32)
    pairs = decode_pair(packed, scale_pair(scale)[:, None])
    if BITS == 32:
        values = tl.join(pairs << 16, pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
        both = tl.max_contiguous(block[:, None] * 32 + tl.arange(0, 32)[None, :], [1, 4])
        tl.store(out_ptr + both, tl.reshape(values, (BLOCKS, 32)), mask=live[:, None])
    else:
        if HALF:
            low = (pairs << 16).to(tl.float32, bitcast=True).to(tl.float16)
            high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.float16)
            pairs = low.to(tl.uint16, bitcast=True).to(tl.uint32) | (
                high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            )
        tl.store(out_ptr + offsets, pairs.to(tl.int32, bitcast=True), mask=live[:, None])
    flag = suspect_ptr + tl.zeros((BLOCKS,), tl.int32)
    tl.store(flag, 1, mask=live & (scale >= SUSPECT))
