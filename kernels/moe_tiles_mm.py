"""Products of sorted rows with their expert's weight in one launch; reference: models.moe.

Tiles come through the device's copy engine; a tile of rows that reaches into the next expert's
rows computes there what it does not store. Programs of one expert follow each other, rows
fastest, so that the expert's rows stay in the second-level cache.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3quant.kernels.expert_tiles import ExpertTiles
from k3quant.kernels.rounding import dot_bf16, to_bf16

TILE_ROWS = 128

_COLS = 128
_DEPTH = 64
_WARPS = 4
_STAGES = 3


def moe_tiles_mm(x: Tensor, weight: Tensor, tiles: ExpertTiles, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight.

    Args:
        x: `[rows, in]` bfloat16, sorted by expert, contiguous.
        weight: `[E, out, in]` bfloat16, contiguous.
        tiles: Tiles of `TILE_ROWS` rows.
        offsets: `[E + 1]` int32, first row of each expert, and the end.

    Returns:
        `[rows, out]` bfloat16.
    """
    width, depth = weight.shape[1:]
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, _COLS)
    if out.numel():
        _moe_tiles_mm_kernel[(len(tiles.expert) * columns,)](
            TensorDescriptor.from_tensor(x, [TILE_ROWS, _DEPTH]),
            TensorDescriptor.from_tensor(weight.view(-1, depth), [_COLS, _DEPTH]),
            out,
            tiles.expert,
            tiles.first,
            offsets,
            columns,
            width,
            depth,
            ROWS=TILE_ROWS,
            COLS=_COLS,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out


@triton.jit
def _moe_tiles_mm_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    expert_ptr,
    first_ptr,
    offsets_ptr,
    columns,
    width,
    depth,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.load(expert_ptr + tl.program_id(0) // columns)
    first = tl.load(first_ptr + expert)
    row_tiles = tl.load(first_ptr + expert + 1) - first
    local = tl.program_id(0) - first * columns
    column = local // row_tiles * COLS
    start = tl.load(offsets_ptr + expert) + local % row_tiles * ROWS
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, depth, DEPTH):
        weight = weight_desc.load([expert * width + column, k])
        total = dot_bf16(x_desc.load([start, k]), weight.T, total)
    row = start + tl.arange(0, ROWS)
    col = column + tl.arange(0, COLS)
    place = row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(out_ptr + place, to_bf16(total), mask=(row < end)[:, None] & (col < width)[None, :])
