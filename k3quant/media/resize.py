"""How large a picture is made, and what pads it to whole tokens."""

import math
from dataclasses import dataclass

from k3quant.media.settings import MediaSettings
from k3quant.models.vision_grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Sizes in pixels: the picture's new ones, and the padding to the right and below."""

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int

    @property
    def size(self) -> tuple[int, int]:
        """New width and height."""
        return self.new_width, self.new_height

    def grid(self, settings: MediaSettings, *, frames: int = 1) -> Grid:
        """Return the patches of the padded picture, or of several of one size."""
        rows = (self.new_height + self.pad_height) // settings.patch_size
        columns = (self.new_width + self.pad_width) // settings.patch_size
        return Grid(frames, rows, columns)


def plan_resize(width: int, height: int, settings: MediaSettings, *, in_patch_limit: int) -> Resize:
    """Shrink a picture to the limits, keeping its shape; never enlarge one.

    The limit of patches sets the scale from the whole patches of the picture as it comes; rounding
    and padding may take the result beyond it. The limit of a side is strict.

    Args:
        width: Pixels, at least 1.
        height: Pixels, at least 1.
        settings: Patch size and limit of a side.
        in_patch_limit: Patches of the whole.

    Source: Kimi-K3 `media_utils.py`, navit_resize_image.
    """
    patch, factor = settings.patch_size, settings.patch_size * settings.merge_kernel_size
    longest = settings.patch_limit_on_one_side * patch
    patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(in_patch_limit / patches), longest / width, longest / height)
    new_width, new_height = (
        min(max(1, int(side * scale)), longest) for side in (width, height)
    )  # fmt: skip
    return Resize(
        new_width=new_width,
        new_height=new_height,
        pad_width=-new_width % factor,
        pad_height=-new_height % factor,
    )
