"""Where a patch lies: the learned grid with its time term, and rotation by rows and columns.

Legend: t frames, h rows and w columns of patches, n = t h w, W tower width, d head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from k3quant.models.vision_grid import Grid

ROTARY_BASE = 10_000.0


class Rotary(NamedTuple):
    """Cosines and sines of all patches, `[n, d / 2]` float32 each."""

    cos: Tensor
    sin: Tensor


def position_embedding(table: Tensor, grid: Grid) -> Tensor:
    """Resize the learned grid to a picture, and add the time term where there are several frames.

    Args:
        table: `[H, W', W]` learned positions.
        grid: The patches.

    Returns:
        `[n, W]` float32. One frame gets no time term; a grid of the table's size is not resized.

    Source: Kimi-K3 modelling code, the divided fixed position embedding.
    """
    positions = table.float()
    if (grid.h, grid.w) != table.shape[:2]:
        positions = interpolate(
            positions.permute(2, 0, 1)[None],
            size=(grid.h, grid.w),
            mode="bilinear",
            align_corners=False,
        )[0].permute(1, 2, 0)
    positions = positions.flatten(0, 1)
    if grid.t == 1:
        return positions
    times = time_embedding(grid.t, table.shape[-1], device=table.device)
    return (positions[None] + times[:, None]).flatten(0, 1)


def time_embedding(frames: int, width: int, *, device: torch.device) -> Tensor:
    """Return sines, then cosines, of frame / 10000^(i / (W / 2)), `[t, W]` float32."""
    steps = torch.arange(width // 2, dtype=torch.float32, device=device) / (width // 2)
    angles = torch.arange(frames, device=device)[:, None] * ROTARY_BASE**-steps
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotary_of(grid: Grid, head_dim: int, *, device: torch.device) -> Rotary:
    """Return the rotation of a grid's patches; every frame has the same.

    Pair 2i of a head turns with the column, pair 2i + 1 with the row, both by 10000^(-4i / d).

    Args:
        grid: The patches.
        head_dim: Width d of a head, a multiple of 4.
        device: Where the table lies.

    Source: Kimi-K3 modelling code, Rope2DPosEmb.
    """
    exponents = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    turns = ROTARY_BASE**-exponents
    columns = torch.arange(grid.w, device=device).repeat(grid.h)
    rows = torch.arange(grid.h, device=device).repeat_interleave(grid.w)
    angles = torch.stack((columns[:, None] * turns, rows[:, None] * turns), dim=-1).flatten(1)
    angles = angles.repeat(grid.t, 1)
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring elements as pairs, in float32.

    Args:
        x: `[..., d]` queries or keys.
        cos: `[..., d / 2]`, of the same number of dimensions; a dimension of 1 is shared.
        sin: As `cos`.

    Returns:
        The shape and dtype of `x`.
    """
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x)
