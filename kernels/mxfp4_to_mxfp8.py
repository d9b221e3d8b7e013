"""MXFP4 codes as the E4M3 bytes of the same values; reference: formats.casts.cast_mxfp4_to_mxfp8.

The scale bytes stay as they are, so every block is exact.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.mx import MX_BLOCK_SIZE
from k3quant.kernels.nibble_table import look_up

_BLOCKS = 128
_WARPS = 4


def cast_mxfp4_to_mxfp8(packed: Tensor, scale_e8m0: Tensor) -> tuple[Tensor, Tensor]:
    """Write every code as the E4M3 byte of the same value.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8; only looked at.

    Returns:
        `[..., cols]` uint8 E4M3 bytes, and an int32 scalar that is 1 when a scale byte is NaN.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    packed, scale_e8m0 = packed.contiguous(), scale_e8m0.contiguous()
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    fault = torch.zeros((), dtype=torch.int32, device=packed.device)
    blocks = scale_e8m0.numel()
    if blocks:
        _cast_mxfp4_to_mxfp8_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            packed.view(torch.int32),
            scale_e8m0,
            codes.view(torch.int32),
            fault,
            blocks,
            BLOCKS=_BLOCKS,
            num_warps=_WARPS,
        )
    return codes, fault


@triton.jit
def _cast_mxfp4_to_mxfp8_kernel(
    words_ptr, scale_ptr, codes_ptr, fault_ptr, blocks, BLOCKS: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < blocks - start
    # Two words a thread become the widest store there is, 16 bytes.
    offsets = tl.max_contiguous(block[:, None] * 4 + tl.arange(0, 4)[None, :], [1, 2])
    words = tl.load(words_ptr + start * 4 + offsets, mask=live[:, None], other=0)
    scale = tl.load(scale_ptr + start + block, mask=live, other=0)
    low = tl.full((1, 1), 0x3C383000, tl.uint32)  # 0, 0.5, 1, 1.5
    high = tl.full((1, 1), 0x4C484440, tl.uint32)  # 2, 3, 4, 6
    first, second = look_up(words.to(tl.uint32, bitcast=True), low, high)
    codes = tl.reshape(tl.join(first, second), (BLOCKS, 8)).to(tl.int32, bitcast=True)
    offsets = tl.max_contiguous(block[:, None] * 8 + tl.arange(0, 8)[None, :], [1, 4])
    tl.store(codes_ptr + start * 8 + offsets, codes, mask=live[:, None])
    tl.store(fault_ptr + tl.zeros((BLOCKS,), tl.int32), 1, mask=live & (scale == 255))
