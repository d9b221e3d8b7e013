"""Cut a matrix into tiles with one scale each; tiles at the right and lower edge may be short."""

import torch
from torch import Tensor
from torch.nn import functional

from k3quant.formats import faults

BlockShape = tuple[int, int]


def grid_shape(shape: tuple[int, ...], block_shape: BlockShape) -> tuple[int, ...]:
    """Return the shape of the scale grid, `[..., ceil(rows / R), ceil(cols / C)]`."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // block_shape[0]), -(-cols // block_shape[1]))


def amax_of_tiles(weight: Tensor, block_shape: BlockShape) -> Tensor:
    """Return the largest magnitude of each tile.

    Args:
        weight: `[..., rows, cols]` floating.
        block_shape: Rows and columns of a full tile.

    Returns:
        `[..., ceil(rows / R), ceil(cols / C)]` float32.

    Raises:
        ValuesError: A value is NaN or infinite; names the first tile.
    """
    amax = cut_tiles(weight.abs(), block_shape).amax(dim=(-3, -1)).float()
    bad = ~torch.isfinite(amax)
    if bool(bad.any()):
        raise faults.not_finite(f"tile {bad.nonzero()[0].tolist()}", int(bad.sum()))
    return amax


def cut_tiles(tensor: Tensor, block_shape: BlockShape, fill: float = 0) -> Tensor:
    """View `[..., rows, cols]` as `[..., tile rows, R, tile cols, C]`, edge tiles filled up."""
    *lead, tile_rows, tile_cols = grid_shape(tuple(tensor.shape), block_shape)
    rows, cols = tensor.shape[-2:]
    short = (0, tile_cols * block_shape[1] - cols, 0, tile_rows * block_shape[0] - rows)
    if any(short):
        tensor = functional.pad(tensor, short, value=fill)
    return tensor.reshape(*lead, tile_rows, block_shape[0], tile_cols, block_shape[1])


def spread_tiles(grid: Tensor, shape: tuple[int, ...], block_shape: BlockShape) -> Tensor:
    """Repeat each grid entry over its tile, cut to `shape`.

    Args:
        grid: `[..., ceil(rows / R), ceil(cols / C)]`.
        shape: `[..., rows, cols]`.
        block_shape: Rows and columns of a full tile.

    Returns:
        A tensor of `shape`.
    """
    rows, cols = shape[-2:]
    tall = grid.repeat_interleave(block_shape[0], dim=-2)[..., :rows, :]
    return tall.repeat_interleave(block_shape[1], dim=-1)[..., :cols]
