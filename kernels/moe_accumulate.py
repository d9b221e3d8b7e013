"""Add some experts' outputs to each token's sum by slot; reference: models.moe.add_outputs."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.rounding import to_float32

_COLS = 1024
_WARPS = 4


def moe_accumulate(out: Tensor, place: Tensor, weight: Tensor, total: Tensor, start: int) -> None:
    """Add the outputs of a run of sorted slots to their tokens' sums; the same order every time.

    Args:
        out: `[rows, D]` outputs of the sorted slots from `start` on, contiguous.
        place: `[N, k]` int64 sorted position of each slot, contiguous.
        weight: `[N, k]` float32, contiguous.
        total: `[N, D]` float32, contiguous; changed in place.
        start: Sorted position of the first row.
    """
    tokens, k = place.shape
    rows, width = out.shape
    if rows and tokens:
        _moe_accumulate_kernel[(tokens, triton.cdiv(width, _COLS))](
            out, place, weight, total, start, rows, width, K=k, COLS=_COLS, num_warps=_WARPS
        )


@triton.jit
def _moe_accumulate_kernel(
    out_ptr,
    place_ptr,
    weight_ptr,
    total_ptr,
    start,
    rows,
    width,
    K: tl.constexpr,
    COLS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < width
    added = tl.zeros((COLS,), tl.float32)
    some = 0
    for j in tl.static_range(K):
        row = tl.load(place_ptr + token * K + j) - start
        share = tl.load(weight_ptr + token * K + j)
        if row >= 0 and row < rows:
            x = tl.load(out_ptr + row * width + col, mask=inside, other=0)
            added += to_float32(x) * share
            some = 1
    if some > 0:
        place = total_ptr + token * width + col
        tl.store(place, tl.load(place, mask=inside, other=0) + added, mask=inside)
