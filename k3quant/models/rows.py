"""Token-wise functions over many tokens, a block of rows at a time, so memory stays bounded."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROW_BLOCK_ELEMENTS = 1 << 22  # 16 MiB of float32 for the widest intermediate
MIN_ROWS = 256  # fewer would read a wide weight too often


def rows_per_block(width: int) -> int:
    """Return how many rows of `width` elements fit a block, at least `MIN_ROWS`."""
    return max(MIN_ROWS, ROW_BLOCK_ELEMENTS // max(1, width))


def in_row_blocks(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], *, width: int
) -> Tensor:
    """Apply a function of rows to blocks of rows.

    Args:
        function: Takes one tensor `[rows, ...]` an input, returns `[rows, N]`.
        inputs: `[..., D]` each, all with the same leading dimensions.
        width: Elements a row of the function's widest intermediate.

    Returns:
        `[..., N]`.
    """
    lead = inputs[0].shape[:-1]
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    rows, step = flat[0].shape[0], rows_per_block(width)
    if rows <= step:
        return function(*flat).reshape(*lead, -1)
    first = function(*(x[:step] for x in flat))
    result = torch.empty((rows, first.shape[-1]), dtype=first.dtype, device=first.device)
    result[:step] = first
    for start in range(step, rows, step):
        result[start : start + step] = function(*(x[start : start + step] for x in flat))
    return result.reshape(*lead, -1)
