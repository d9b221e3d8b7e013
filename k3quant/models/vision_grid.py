"""Grids of patches: how a picture or a chunk of a video is cut, and what the tower accepts."""

from typing import NamedTuple

from k3quant.errors import SchemaError
from k3quant.models.k3_config import VisionConfig


class Grid(NamedTuple):
    """Patches of one picture (t = 1) or of one chunk of a video, in this order of axes."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Patches of all frames."""
        return self.t * self.h * self.w


def check_grid(grid: Grid, vision: VisionConfig) -> None:
    """Refuse a grid that the tower has no positions for, or that does not merge.

    Raises:
        SchemaError: No frame or more than `init_pos_emb_time`, or sides that are no multiples of
            the merge kernel.
    """
    if not 1 <= grid.t <= vision.init_pos_emb_time:
        raise SchemaError(
            f"grid {tuple(grid)}: expected 1 to {vision.init_pos_emb_time} frames in a chunk, "
            f"got {grid.t}",
            hint="a longer video goes through the tower in chunks",
        )
    for name, side, step in zip(
        ("rows", "columns"), (grid.h, grid.w), vision.merge_kernel_size, strict=True
    ):
        if side < step or side % step:
            raise SchemaError(
                f"grid {tuple(grid)}: expected {name} in whole groups of {step}, got {side}"
            )
