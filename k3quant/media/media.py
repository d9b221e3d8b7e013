"""One picture or video of a prompt: the segments the tower sees and the text around each.

Planning reads headers alone; pixels are decoded when a segment's patches are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3quant.errors import SchemaError
from k3quant.media.frames import Frames, open_frames
from k3quant.media.picture import open_picture, to_patches
from k3quant.media.resize import Resize, plan_resize
from k3quant.media.settings import MediaSettings, VideoSettings
from k3quant.models.vision_grid import Grid

_DAY_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSegment:
    """A picture, or a chunk of a video.

    Attributes:
        grid: Its patches.
        stamp: Text before it: the time of a chunk, nothing for a picture.
        caption: Text inside it, before its features.
    """

    grid: Grid
    stamp: str
    caption: str
    _path: Path
    _plan: Resize = field(repr=False)
    _settings: MediaSettings = field(repr=False)
    _frames: Frames | None = field(repr=False)
    _places: tuple[int, ...] = field(repr=False)
    _ends: bool = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Features that the language model gets: frames are averaged, neighbours merged."""
        return self.grid.h * self.grid.w // self._settings.merge_kernel_size**2

    def pixels(self) -> npt.NDArray[np.float32]:
        """Decode the patches, `[n, 3, patch, patch]`, frame after frame.

        Raises:
            K3QuantError: A picture is gone, broken or of another size.
        """
        if self._frames is None:
            with open_picture(self._path) as image:
                return to_patches(image, self._plan, self._settings, path=self._path)
        patches = [
            to_patches(frame, self._plan, self._settings, path=self._path)
            for frame in self._frames.read(self._places, last=self._ends)
        ]
        return np.concatenate(patches)


def plan_picture(path: Path, settings: MediaSettings) -> tuple[MediaSegment, ...]:
    """Plan a picture: one segment.

    Args:
        path: A PNG, JPEG or WebP file.
        settings: The checkpoint's.

    Raises:
        SchemaError: It is animated, or of no use (see `open_picture`).
        K3QuantError: As `open_picture`.

    Source: Kimi-K3 `kimi_k3_processor.py`: the caption holds the size before any resize.
    """
    with open_picture(path) as image:
        count = int(getattr(image, "n_frames", 1))
        if count > 1:
            raise SchemaError(
                f"{path}: expected one picture, got an animation of {count} frames",
                hint="give a folder of frames or a GIF as a video",
            )
        width, height = image.size
    plan = plan_resize(width, height, settings, in_patch_limit=settings.in_patch_limit)
    segment = MediaSegment(
        grid=plan.grid(settings), stamp="", caption=f"image {width}x{height}",
        _path=path, _plan=plan, _settings=settings, _frames=None, _places=(), _ends=True,
    )  # fmt: skip
    return (segment,)


def plan_video(
    path: Path, settings: MediaSettings, *, fps: float | None = None
) -> tuple[MediaSegment, ...]:
    """Plan a video: one segment a chunk of sampled frames.

    Args:
        path: A folder of frames, or an animated GIF.
        settings: The checkpoint's.
        fps: Frames a second; a GIF may say it itself.

    Raises:
        SchemaError: The checkpoint says nothing about videos, the frame rate is missing or not
            positive, or the video lasts a day.
        K3QuantError: As `open_frames`.

    Source: Kimi-K2.5 `kimi_k25_vision_processing.py`, which Kimi-K3's keys belong to: the frames
    that are sampled, the patches of each, and the time of a chunk's first frame before it.
    """
    video = settings.video
    if video is None:
        raise SchemaError(
            f"{path}: expected a checkpoint that samples videos, got no `sample_fps` in its "
            "preprocessor_config.json"
        )
    if fps is not None and not fps > 0:
        raise SchemaError(f"{path}: expected a positive fps, got {fps}")
    frames = open_frames(path, fps=fps)
    if frames.count / frames.fps >= _DAY_SECONDS:
        raise SchemaError(f"{path}: expected a video of under a day, got {frames.count} frames")
    places = sample_frames(frames.count, frames.fps, video)
    limit = video.in_patch_limit_each_frame
    if video.in_patch_limit_video is not None:
        limit = min(limit, max(1, round(video.in_patch_limit_video / len(places))))
    plan = plan_resize(*frames.size, settings, in_patch_limit=limit)
    step = video.temporal_merge_kernel_size
    return tuple(
        MediaSegment(
            grid=plan.grid(settings, frames=len(chunk)), stamp=timestamp(chunk[0] / frames.fps),
            caption="video", _path=path, _plan=plan, _settings=settings, _frames=frames,
            _places=tuple(chunk), _ends=chunk[-1] == places[-1],
        )
        for chunk in (places[first : first + step] for first in range(0, len(places), step))
    )  # fmt: skip


def sample_frames(count: int, fps: float, video: VideoSettings) -> Sequence[int]:
    """Return which frames are kept, evenly from the first to the last, at least one.

    Args:
        count: Frames of the video.
        fps: Frames a second.
        video: How many a second are kept, and how many at most.
    """
    kept = max(round(count * min(video.sample_fps, fps) / fps), 1)
    if video.max_num_frames_each_video is not None:
        kept = min(kept, video.max_num_frames_each_video)
    places: list[int] = np.linspace(0, count - 1, kept).round().astype(int).tolist()
    return places


def timestamp(seconds: float) -> str:
    """Spell a time below a day as `hh:mm:ss.fff`, cut to milliseconds."""
    whole = int(seconds)
    return (
        f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
    )
