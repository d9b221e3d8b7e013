import copy
from dataclasses import replace

import pytest

from k3quant.errors import SchemaError
from k3quant.media.settings import Chessboard, check_settings, read_settings
from k3quant.models.k3_config import read_config

# The released values, as far as they are on record.
RELEASED = {
    "media_proc_cfg": {
        "in_patch_limit": 65536,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 16384,
        "in_patch_limit_video": 655360,
        "sample_fps": 8.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    }
}


@pytest.fixture
def released():
    return copy.deepcopy(RELEASED)


def test_the_released_values_are_read(released, k3_config):
    settings = read_settings(released)
    assert settings.in_patch_limit == 65536
    assert settings.background == Chessboard(square=8, white=255, gray=180)
    assert settings.video is not None
    assert settings.video.sample_fps == 8.0
    assert settings.video.in_patch_limit_video == 655360
    check_settings(settings, read_config(k3_config).vision)


def test_what_the_tiny_checkpoint_does_not_say_is_none(settings):
    assert settings.background is None
    assert settings.video is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        pytest.param("fixed_output_tokens", 64, "fixed_output_tokens: expected None", id="fixed"),
        pytest.param("patch_size", "14", "patch_size: expected an integer", id="patch"),
        pytest.param("image_mean", [0.5, 0.5], "image_mean: expected three", id="two-means"),
        pytest.param("image_std", [0.5, 0.0, 1], "image_std: expected no zero", id="zero-std"),
        pytest.param("image_std", [float("nan")] * 3, "image_std: expected three fin", id="nan"),
        pytest.param("patch_limit_on_one_side", 511, "expected a multiple of merge", id="odd"),
        pytest.param("timestamp_mode", "mm:ss", "timestamp_mode: expected 'hh", id="timestamps"),
        pytest.param("transparent_bg_fill_stage", "before_resize", "'after_resize'", id="stage"),
        pytest.param("sharpen", 1, "sharpen: expected only keys", id="unknown-key"),
    ],
)
def test_values_that_are_not_implemented_are_refused(released, key, value, said):
    released["media_proc_cfg"][key] = value
    with pytest.raises(SchemaError, match=said):
        read_settings(released)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pattern", "white"), ("chessboard_square_on_top_left", False), ("chessboard_blue", 3),
     ("chessboard_gray_value", 256)],
)  # fmt: skip
def test_other_backgrounds_are_refused(released, key, value):
    released["media_proc_cfg"]["transparent_bg_config"][key] = value
    with pytest.raises(SchemaError, match=r"media_proc_cfg\.transparent_bg_config"):
        read_settings(released)


@pytest.mark.parametrize("key", ["patch_size", "timestamp_mode", "transparent_bg_fill_stage"])
def test_a_missing_key_is_refused(released, key):
    del released["media_proc_cfg"][key]
    with pytest.raises(SchemaError, match=f"{key}: expected a value"):
        read_settings(released)


def test_a_document_without_the_section_is_refused():
    with pytest.raises(SchemaError, match="expected an object `media_proc_cfg`"):
        read_settings({"patch_size": 14})


def test_patches_and_chunks_must_be_the_towers(settings, with_video, oracle, k3_config):
    vision = read_config(k3_config).vision
    with pytest.raises(SchemaError, match="patch_size: expected the tower's 14, got 16"):
        check_settings(replace(settings, patch_size=16), vision)
    five = replace(with_video.video, temporal_merge_kernel_size=5)
    with pytest.raises(SchemaError, match=r"expected at most the 4 frames .*, got 5"):
        check_settings(replace(with_video, video=five), vision)
