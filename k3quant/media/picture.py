"""Pictures from files, and their patches: resized, laid on a background, padded, normalised, cut.

Pillow is an extra, so it is imported where it is used.
"""

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from k3quant.errors import (
    IncompleteError,
    RefusedError,
    ResourceError,
    SchemaError,
    StructureError,
)
from k3quant.media.resize import Resize
from k3quant.media.settings import Chessboard, MediaSettings

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("RGB", "RGBA", "L", "LA", "P")
_ROWS = 256  # of a picture that are laid on a background at a time
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)

Pixels = npt.NDArray[np.uint8]


@contextmanager
def open_picture(path: Path, *, formats: tuple[str, ...] = PICTURE_FORMATS) -> "Iterator[Image]":
    """Open a picture; its pixels are decoded when they are asked for.

    Turns and mirrors that EXIF asks for are not applied.

    Args:
        path: The file.
        formats: Formats it may have, as Pillow names them.

    Raises:
        RefusedError: Pillow is not installed, or the picture is larger than Pillow deems safe.
        IncompleteError: The file is missing.
        StructureError: It is no picture, or broken.
        SchemaError: It has no pixels or one, or not 8 bits of red, green, blue or grey.
        ResourceError: It cannot be read.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise RefusedError(
            "pictures: expected the package pillow, got none",
            hint="`pip install k3quant[vision]` brings it",
        ) from error
    named = " or ".join(formats)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path, formats=formats)
    except FileNotFoundError as error:
        raise IncompleteError(f"{path}: expected a picture, got no such file") from error
    except UnidentifiedImageError as error:
        size = _declared_size(path)
        if size is not None:
            check_size(path, size)
        raise StructureError(f"{path}: expected a {named} with pixels, got another file") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise RefusedError(
            f"{path}: expected at most {Image.MAX_IMAGE_PIXELS} pixels, got more",
            hint="make the picture smaller; the model would see it shrunk anyway",
        ) from error
    except OSError as error:
        raise ResourceError(f"{path}: expected a readable file, got `{error.strerror}`") from error
    except _BROKEN as error:
        raise _broken(path, error) from error
    with image:
        check_size(path, image.size)
        if image.mode not in MODES:
            raise SchemaError(
                f"{path}: expected a picture of {', '.join(MODES)}, got {image.mode}",
                hint="convert it to 8-bit RGB",
            )
        yield image


def check_size(path: Path, size: tuple[int, int]) -> None:
    """Refuse pictures that show nothing.

    Raises:
        SchemaError: No pixel, or a single one.
    """
    width, height = size
    if width * height < 2:
        raise SchemaError(
            f"{path}: expected a picture of at least 2 pixels, got {width} x {height}"
        )


def decode(image: "Image", path: Path) -> None:
    """Decode a picture's pixels.

    Raises:
        StructureError: They are cut short or broken.
    """
    try:
        image.load()
    except _BROKEN as error:
        raise _broken(path, error) from error


def to_patches(
    image: "Image", plan: Resize, settings: MediaSettings, *, path: Path
) -> npt.NDArray[np.float32]:
    """Return the normalised patches of a picture.

    Args:
        image: A picture in one of `MODES`.
        plan: Its new size and padding.
        settings: Patch size, mean, standard deviation and background.
        path: Where it came from, for messages.

    Returns:
        `[n, 3, patch, patch]`, rows of patches from above, each from the left. Padding is black.

    Raises:
        StructureError: The picture's pixels are broken.
        SchemaError: It is transparent and must be resized, but the settings name no background.

    Source: Kimi-K3 `kimi_k3_vision_processing.py`, `media_utils.py`.
    """
    decode(image, path)
    rgb = resized_rgb(image, plan.size, settings.background, path=path)
    rgb = np.pad(rgb, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))
    patch = settings.patch_size
    rows, columns = rgb.shape[0] // patch, rgb.shape[1] // patch
    cut = rgb.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    cut = cut.reshape(-1, 3, patch, patch)
    result = np.empty(cut.shape, dtype=np.float32)
    for channel, levels in enumerate(_normalised_levels(settings)):
        result[:, channel] = levels[cut[:, channel]]
    return result


def resized_rgb(
    image: "Image", size: tuple[int, int], background: Chessboard | None, *, path: Path
) -> Pixels:
    """Resize by bicubic interpolation, then lay transparent pixels on the background.

    Args:
        image: A picture in one of `MODES`.
        size: New width and height.
        background: None drops transparency.
        path: Where it came from, for messages.

    Returns:
        `[height, width, 3]`.

    Raises:
        SchemaError: It is transparent and must be resized, but there is no background.
    """
    from PIL.Image import Resampling

    if image.mode == "P":
        image = image.convert("RGBA")
    plain = image.mode == "RGB"
    transparent = not plain and ("A" in image.getbands() or "transparency" in image.info)
    if transparent and background is None and image.size != size:
        raise SchemaError(
            f"{path}: expected a `transparent_bg_config` for a transparent picture that must be "
            "resized, got none",
            hint="whether transparency goes before or after the resize is not on record",
        )
    image = image.resize(size, Resampling.BICUBIC)
    if background is None or not transparent:
        return np.asarray(image if plain else image.convert("RGB"))
    return _composite(np.asarray(image.convert("RGBA")), background)


def _composite(rgba: Pixels, board: Chessboard) -> Pixels:
    height, width = rgba.shape[:2]
    result = np.empty((height, width, 3), dtype=np.uint8)
    columns = np.arange(width) // board.square
    for first in range(0, height, _ROWS):
        rows = np.arange(first, min(first + _ROWS, height)) // board.square
        odd = (rows[:, None] + columns) % 2 == 1
        under = np.where(odd, np.float32(board.gray), np.float32(board.white))[..., None]
        piece = rgba[first : first + _ROWS]
        alpha = piece[..., 3:].astype(np.float32) / np.float32(255)
        # Truncated, not rounded, as the vendor's cast does.
        result[first : first + _ROWS] = (alpha * piece[..., :3] + (1 - alpha) * under).astype(
            np.uint8
        )
    return result


def _normalised_levels(settings: MediaSettings) -> Iterator[npt.NDArray[np.float32]]:
    """Yield what each of the 256 levels becomes, a channel after the other.

    The steps and their rounding are numpy's for float32 pixels and float64 constants.
    """
    levels = (np.arange(256) / 255.0).astype(np.float32)
    for mean, std in zip(settings.image_mean, settings.image_std, strict=True):
        centred = (levels.astype(np.float64) - mean).astype(np.float32)
        yield (centred.astype(np.float64) * (1.0 / std)).astype(np.float32)


def _declared_size(path: Path) -> tuple[int, int] | None:
    """Read width and height where Pillow would not: it takes a size of zero for another file."""
    with path.open("rb") as file:
        head = file.read(24)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) == 24:
        width, height = struct.unpack(">II", head[16:])
        return width, height
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        width, height = struct.unpack("<HH", head[6:10])
        return width, height
    return None


def _broken(path: Path, error: Exception) -> StructureError:
    return StructureError(f"{path}: expected a whole picture, got a broken one: {error}")
