"""What `preprocessor_config.json` says about pictures and videos.

Keys keep the checkpoint's spelling; a missing or unknown one is refused, since every processor has
other defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3quant.errors import SchemaError
from k3quant.models.config_keys import KeyReader
from k3quant.models.k3_config import VisionConfig

PREPROCESSOR_FILE = "preprocessor_config.json"
_WHERE = f"{PREPROCESSOR_FILE}: media_proc_cfg."
# Read here without the reader, or of no meaning.
_KNOWN = frozenset({"config_type", "image_mean", "image_std"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chessboard:
    """What a transparent picture is laid on, once it is resized.

    Attributes:
        square: Side of a square, pixels.
        white: Level of the squares like the upper left one.
        gray: Level of the others.
    """

    square: int
    white: int
    gray: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """How a video is sampled.

    Attributes:
        sample_fps: Frames a second that are kept, at most those it has.
        temporal_merge_kernel_size: Frames of a chunk.
        in_patch_limit_each_frame: Patches of a frame.
        in_patch_limit_video: Patches of all frames; None is no limit.
        max_num_frames_each_video: Frames that are kept at most; None is no limit.
    """

    sample_fps: float
    temporal_merge_kernel_size: int
    in_patch_limit_each_frame: int
    in_patch_limit_video: int | None
    max_num_frames_each_video: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """How pictures become patches.

    Attributes:
        patch_size: Side of a patch, pixels.
        merge_kernel_size: Patches a side that are merged into one token.
        in_patch_limit: Patches of a picture, before it is padded to whole tokens.
        patch_limit_on_one_side: Patches of a side.
        image_mean: Of red, green and blue, where white is 1.
        image_std: As the mean.
        background: Under transparent pictures; None drops transparency.
        video: None where the checkpoint says nothing about videos.
    """

    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    background: Chessboard | None
    video: VideoSettings | None


def read_settings(document: Mapping[str, Any]) -> MediaSettings:
    """Read a parsed `preprocessor_config.json`.

    Raises:
        SchemaError: A key is missing, unknown, or has a value that is not implemented.

    Source: Kimi-K3 `preprocessor_config.json`, `kimi_k3_vision_processing.py`.
    """
    section = document.get("media_proc_cfg")
    if not isinstance(section, Mapping):
        raise SchemaError(f"{PREPROCESSOR_FILE}: expected an object `media_proc_cfg`, got none")
    keys = KeyReader(section, path=_WHERE)
    keys.check_values({"fixed_output_tokens": (None,)})
    settings = MediaSettings(
        patch_size=keys.count("patch_size"),
        merge_kernel_size=keys.count("merge_kernel_size"),
        in_patch_limit=keys.count("in_patch_limit"),
        patch_limit_on_one_side=keys.count("patch_limit_on_one_side"),
        image_mean=_channels(section, "image_mean"),
        image_std=_channels(section, "image_std"),
        background=_read_background(keys),
        video=_read_video(keys),
    )
    keys.refuse_unknown(known=_KNOWN)
    if 0.0 in settings.image_std:
        raise SchemaError(f"{_WHERE}image_std: expected no zero, got {settings.image_std}")
    if settings.patch_limit_on_one_side % settings.merge_kernel_size:
        raise SchemaError(
            f"{_WHERE}patch_limit_on_one_side: expected a multiple of merge_kernel_size "
            f"{settings.merge_kernel_size}, got {settings.patch_limit_on_one_side}"
        )
    return settings


def check_settings(settings: MediaSettings, vision: VisionConfig) -> None:
    """Refuse patches that are not the tower's.

    Raises:
        SchemaError: Patch size, merge kernel or frames of a chunk differ.
    """
    rows, columns = vision.merge_kernel_size
    facts = [
        ("patch_size", vision.patch_size, settings.patch_size),
        ("merge_kernel_size", rows, settings.merge_kernel_size),
        ("merge_kernel_size", columns, settings.merge_kernel_size),
    ]
    for key, expected, got in facts:
        if expected != got:
            raise SchemaError(f"{_WHERE}{key}: expected the tower's {expected}, got {got}")
    most, video = vision.init_pos_emb_time, settings.video
    if video is not None and video.temporal_merge_kernel_size > most:
        raise SchemaError(
            f"{_WHERE}temporal_merge_kernel_size: expected at most the {most} frames that the "
            f"tower has times for, got {video.temporal_merge_kernel_size}"
        )


def _channels(section: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value: Any = section.get(key)
    numbers = isinstance(value, list) and all(type(level) in (int, float) for level in value)
    if not numbers or len(value) != 3 or not all(map(math.isfinite, value)):
        raise SchemaError(f"{_WHERE}{key}: expected three finite numbers, got {value!r}")
    return float(value[0]), float(value[1]), float(value[2])


def _read_background(keys: KeyReader) -> Chessboard | None:
    stage, section = "transparent_bg_fill_stage", "transparent_bg_config"
    if keys.raw.get(section) is None:
        keys.check_values({section: (None,), stage: ("after_resize", "before_resize", None)})
        return None
    keys.check_values({stage: ("after_resize",)}, required=(stage,))
    board = keys.section(section)
    board.check_values(
        {"pattern": ("chessboard",), "chessboard_square_on_top_left": (True,)},
        required=("pattern", "chessboard_square_on_top_left"),
    )
    result = Chessboard(
        square=board.count("chessboard_square_size"),
        white=board.count("chessboard_white_value", least=0),
        gray=board.count("chessboard_gray_value", least=0),
    )
    board.refuse_unknown()
    if max(result.white, result.gray) > 255:
        raise SchemaError(f"{board.path}: expected levels up to 255, got {result}")
    return result


def _read_video(keys: KeyReader) -> VideoSettings | None:
    if "sample_fps" not in keys.raw:
        return None
    keys.check_values({"timestamp_mode": ("hh:mm:ss.fff",)}, required=("timestamp_mode",))
    return VideoSettings(
        sample_fps=keys.number("sample_fps"),
        temporal_merge_kernel_size=keys.count("temporal_merge_kernel_size"),
        in_patch_limit_each_frame=keys.count("in_patch_limit_each_frame"),
        in_patch_limit_video=keys.optional_count("in_patch_limit_video", least=1),
        max_num_frames_each_video=keys.optional_count("max_num_frames_each_video", least=1),
    )
