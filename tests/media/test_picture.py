import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from k3quant.errors import (
    ExitCode,
    IncompleteError,
    RefusedError,
    ResourceError,
    SchemaError,
    StructureError,
)
from k3quant.media.picture import open_picture, resized_rgb, to_patches
from k3quant.media.resize import plan_resize
from k3quant.media.settings import Chessboard

BOARD = Chessboard(square=8, white=255, gray=180)


def _png(width, height):
    """Return the bytes of a PNG of any declared size, which Pillow would not write."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(3 * width)) * min(height, 9)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.fixture
def picture(tmp_path):
    """Write a picture and return its path."""

    def write(image, name="picture.png", **options):
        path = tmp_path / name
        image.save(path, **options)
        return path

    return write


@pytest.mark.parametrize("name", ["rgb_70x45", "rgb_200x150", "rgba_50x61"])
def test_patches_equal_the_vendors_bit_for_bit(golden_folder, settings, name):
    golden = load_file(golden_folder / "image_processor.safetensors")
    path = golden_folder / f"{name}.png"
    with open_picture(path) as image:
        plan = plan_resize(*image.size, settings, in_patch_limit=settings.in_patch_limit)
        patches = to_patches(image, plan, settings, path=path)
    assert torch.equal(torch.from_numpy(patches), golden[f"{name}.pixel_values"])
    assert tuple(plan.grid(settings)) == tuple(golden[f"{name}.grid_thw"].tolist())


@pytest.mark.parametrize("name", ["picture.png", "picture.jpg", "picture.webp"])
def test_formats_are_opened_by_content(picture, name):
    with open_picture(picture(Image.new("RGB", (8, 6), (9, 90, 200)), name)) as image:
        assert image.size == (8, 6)
        rgb = resized_rgb(image, (8, 6), None, path=name)
    assert np.abs(rgb.astype(int) - [9, 90, 200]).max() <= 4  # what JPEG loses


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        pytest.param("L", 77, 77, id="grey"),
        pytest.param("P", 0, 0, id="palette"),
        pytest.param("LA", (77, 255), 77, id="opaque-grey"),
    ],
)
def test_grey_and_palette_become_rgb(mode, color, expected):
    rgb = resized_rgb(Image.new(mode, (4, 4), color), (2, 2), BOARD, path="x")
    assert rgb.shape == (2, 2, 3)
    assert (rgb == expected).all()


def test_transparent_pixels_show_a_chessboard_that_begins_white():
    rgb = resized_rgb(Image.new("RGBA", (17, 9), (255, 0, 0, 0)), (17, 9), BOARD, path="x")
    assert rgb[0, 0].tolist() == rgb[7, 7].tolist() == rgb[8, 8].tolist() == [255] * 3
    assert rgb[0, 8].tolist() == rgb[8, 0].tolist() == [180] * 3
    assert rgb[0, 16].tolist() == [255] * 3


def test_half_transparent_pixels_are_mixed_and_cut_to_whole_levels():
    rgb = resized_rgb(Image.new("RGBA", (1, 1), (100, 0, 255, 51)), (1, 1), BOARD, path="x")
    assert rgb[0, 0].tolist() == [224, 204, 255]  # 0.2 * 100 + 0.8 * 255, and so on


def test_the_chessboard_is_drawn_after_the_resize():
    rgb = resized_rgb(Image.new("RGBA", (64, 64), (0, 0, 0, 0)), (16, 16), BOARD, path="x")
    assert set(np.unique(rgb)) == {180, 255}
    assert rgb[0, 8, 0] == 180


def test_a_large_transparent_picture_is_composed_without_seams():
    rgb = resized_rgb(Image.new("RGBA", (9, 600), (0, 0, 0, 0)), (9, 600), BOARD, path="x")
    expected = np.where((np.arange(600) // 8) % 2, 180, 255)
    assert (rgb[:, 0, 0] == expected).all()


def test_a_transparent_palette_goes_through_the_background(picture):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    with open_picture(picture(image, transparency=1)) as opened:
        rgb = resized_rgb(opened, (4, 4), BOARD, path="x")
    assert (rgb == 255).all()


def test_without_a_background_transparency_is_dropped_but_not_resized():
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert (resized_rgb(image, (4, 4), None, path="x") == [10, 20, 30]).all()
    with pytest.raises(SchemaError, match="expected a `transparent_bg_config`"):
        resized_rgb(image, (2, 2), None, path="x")


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        pytest.param(_png(0, 4), SchemaError, "at least 2 pixels, got 0 x 4", id="no-width"),
        pytest.param(_png(4, 0), SchemaError, "at least 2 pixels, got 4 x 0", id="no-height"),
        pytest.param(_png(1, 1), SchemaError, "at least 2 pixels, got 1 x 1", id="one-pixel"),
        pytest.param(b"GIF89a" + bytes(8), SchemaError, "got 0 x 0", id="empty-gif"),
        pytest.param(b"", StructureError, "expected a PNG or JPEG or WEBP", id="empty-file"),
        pytest.param(b"text", StructureError, "expected a PNG or JPEG or WEBP", id="text"),
        pytest.param(_png(65535, 65535), RefusedError, "expected at most", id="bomb"),
        pytest.param(_png(12000, 12000), RefusedError, "expected at most", id="large"),
    ],
)
def test_pictures_of_no_use_are_refused(tmp_path, data, error, said):
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    with pytest.raises(error, match=said) as caught, open_picture(path):
        pass
    assert str(path) in caught.value.message


def test_a_picture_of_two_pixels_is_accepted(tmp_path, settings):
    path = tmp_path / "picture.png"
    path.write_bytes(_png(1, 2))
    with open_picture(path) as image:
        plan = plan_resize(*image.size, settings, in_patch_limit=48)
        assert to_patches(image, plan, settings, path=path).shape == (4, 3, 14, 14)


def test_a_missing_picture_and_a_folder_are_named(tmp_path):
    with pytest.raises(IncompleteError, match="got no such file"), open_picture(tmp_path / "x"):
        pass
    with pytest.raises(ResourceError, match="expected a readable file"), open_picture(tmp_path):
        pass


def test_a_picture_that_is_cut_short_is_broken(golden_folder, tmp_path, settings):
    path = tmp_path / "short.png"
    path.write_bytes((golden_folder / "rgb_200x150.png").read_bytes()[:20_000])
    with open_picture(path) as image, pytest.raises(StructureError, match="got a broken one"):
        to_patches(
            image, plan_resize(*image.size, settings, in_patch_limit=48), settings, path=path
        )


def test_other_kinds_of_pixels_are_refused(picture):
    path = picture(Image.new("CMYK", (4, 4)), "picture.jpg")
    with pytest.raises(SchemaError, match="got CMYK") as caught, open_picture(path):
        pass
    assert caught.value.exit_code is ExitCode.SCHEMA


def test_without_pillow_the_extra_is_named(golden_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with (
        pytest.raises(RefusedError, match="expected the package pillow") as caught,
        open_picture(golden_folder / "rgb_70x45.png"),
    ):
        pass
    assert "k3quant[vision]" in caught.value.hint
