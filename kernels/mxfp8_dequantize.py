"""MXFP8 to floats, E4M3 * 2^(scale - 127); reference: formats.mxfp8.dequantize_mxfp8."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_shape
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.kernels.nvfp4_dequantize import TRITON_DTYPE
from k3quant.kernels.rounding import decode_e4m3_word, is_nan_e4m3, join_four, to_dtype

# The smallest scale byte under which a code may overflow.
_SUSPECT = {torch.float32: 247, torch.bfloat16: 247, torch.float16: 135}
_BLOCKS = 64
_WARPS = 4


def dequantize_mxfp8(
    codes: Tensor, scale_e8m0: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Compute E4M3 * 2^(scale - 127).

    Args:
        codes: `[..., cols]` uint8 E4M3 bytes.
        scale_e8m0: `[..., cols / 32]` uint8.
        dtype: float32, bfloat16 or float16.

    Returns:
        `[..., cols]` in `dtype`, and an int32 scalar that is 1 when a byte of codes or scales is
        NaN, or a scale so large that a code may have overflowed.

    Raises:
        SchemaError: The scale grid does not fit.
    """
    check_shape("scale grid", scale_e8m0, (*codes.shape[:-1], codes.shape[-1] // MX_BLOCK_SIZE))
    codes, scale_e8m0 = codes.contiguous(), scale_e8m0.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    suspect = torch.zeros((), dtype=torch.int32, device=codes.device)
    blocks = scale_e8m0.numel()
    if blocks:
        _dequantize_mxfp8_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            codes.view(torch.int32),
            scale_e8m0,
            out,
            suspect,
            blocks,
            SUSPECT=_SUSPECT[dtype],
            DTYPE=TRITON_DTYPE[dtype],
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return out, suspect


@triton.jit
def _dequantize_mxfp8_kernel(
    words_ptr,
    scale_ptr,
    out_ptr,
    suspect_ptr,
    blocks,
    SUSPECT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    # Two words a thread become the widest store there is, 16 bytes.
    place = tl.max_contiguous(block[:, None] * 8 + tl.arange(0, 8)[None, :], [1, 2])
    words = tl.load(words_ptr + start * 8 + place, mask=live[:, None], other=0)
    words = words.to(tl.uint32, bitcast=True)
    byte = tl.load(scale_ptr + start + block, mask=live, other=0).to(tl.int32)
    scale = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)[:, None]
    a, b, c, d = decode_e4m3_word(words)
    values = join_four(a * scale, b * scale, c * scale, d * scale, BLOCKS, 32)
    place = tl.max_contiguous(block[:, None] * 32 + tl.arange(0, 32)[None, :], [1, 8])
    tl.store(out_ptr + start * 32 + place, to_dtype(values, DTYPE), mask=live[:, None])
    bad = (tl.max(is_nan_e4m3(words), axis=1) > 0) | (byte >= SUSPECT)
    tl.store(suspect_ptr + tl.zeros((BLOCKS,), tl.int32), 1, mask=live & bad)
