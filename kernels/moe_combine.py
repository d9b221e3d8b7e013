"""Sum each token's expert outputs in float32, by ascending slot; reference: models.moe."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.rounding import to_dtype, to_float32

_COLS = 1024
_WARPS = 4


def moe_combine(out: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """Sum the outputs of each token's slots, weighted; the same order every time.

    Args:
        out: `[N k, D]` outputs of the sorted slots, contiguous.
        place: `[N, k]` int64 sorted position of each slot, contiguous.
        weight: `[N, k]` float32, contiguous.

    Returns:
        `[N, D]` in the dtype of `out`.
    """
    tokens, k = place.shape
    width = out.shape[-1]
    total = torch.empty((tokens, width), dtype=out.dtype, device=out.device)
    if total.numel():
        _moe_combine_kernel[(tokens, triton.cdiv(width, _COLS))](
            out, place, weight, total, width, K=k, COLS=_COLS, num_warps=_WARPS
        )
    return total


@triton.jit
def _moe_combine_kernel(
    out_ptr, place_ptr, weight_ptr, total_ptr, width, K: tl.constexpr, COLS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place_ptr + token * K + j)
        share = tl.load(weight_ptr + token * K + j)
        total += to_float32(tl.load(out_ptr + row * width + col, mask=col < width, other=0)) * share
    value = to_dtype(total, total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * width + col, value, mask=col < width)
