import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from k3quant.media.settings import MediaSettings, VideoSettings, read_settings


@pytest.fixture(scope="session")
def golden_folder(data: Path) -> Path:
    """Return the folder of the golden pictures."""
    return data / "oracle" / "golden"


@pytest.fixture(scope="session")
def document(oracle: Path) -> dict[str, object]:
    """Return the tiny checkpoint's preprocessor_config.json."""
    found: dict[str, object] = json.loads((oracle / "preprocessor_config.json").read_text())
    return found


@pytest.fixture(scope="session")
def settings(document: dict[str, object]) -> MediaSettings:
    """Return the tiny checkpoint's settings."""
    return read_settings(document)


@pytest.fixture(scope="session")
def with_video(settings: MediaSettings) -> MediaSettings:
    """Return settings that sample 8 frames a second, 4 a chunk."""
    video = VideoSettings(
        sample_fps=8.0,
        temporal_merge_kernel_size=4,
        in_patch_limit_each_frame=48,
        in_patch_limit_video=None,
        max_num_frames_each_video=None,
    )
    return replace(settings, video=video)


@pytest.fixture
def write_frames(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes frames whose red is their number times 20."""

    def write(count: int, *, size: tuple[int, int] = (28, 28), name: str = "f{}.png") -> Path:
        folder = tmp_path / "frames"
        folder.mkdir()
        for place in range(count):
            Image.new("RGB", size, (place * 20, 0, 0)).save(folder / name.format(place))
        return folder

    return write


@pytest.fixture
def write_gif(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a GIF of such frames."""

    def write(count: int, *, milliseconds: int = 100) -> Path:
        path = tmp_path / "video.gif"
        frames = [Image.new("RGB", (28, 28), (place * 20, 0, 0)) for place in range(count)]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds)
        return path

    return write
