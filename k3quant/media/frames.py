"""Frames of a video: pictures in a folder, by the numbers in their names, or an animated GIF."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from k3quant.errors import IncompleteError, SchemaError
from k3quant.media.picture import check_size, decode, open_picture

if TYPE_CHECKING:
    from PIL.Image import Image

FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class Frames(Protocol):
    """A source of frames of one size.

    Attributes:
        path: Where it lies.
        count: Number of frames.
        size: Width and height.
        fps: Frames a second.
    """

    path: Path
    count: int
    size: tuple[int, int]
    fps: float

    def read(self, places: Sequence[int], *, last: bool) -> "Iterator[Image]":
        """Yield some frames, ascending; each is open until the next is asked for.

        Args:
            places: Which frames.
            last: Whether no later ones will be asked for.
        """


def open_frames(path: Path, *, fps: float | None) -> Frames:
    """Open a video.

    Args:
        path: A folder of pictures, or an animated GIF.
        fps: Frames a second; a GIF may say it itself.

    Raises:
        IncompleteError: There is none, or it has no frames.
        SchemaError: No frame rate, or frames that do not fit together.
        K3QuantError: As `open_picture`.
    """
    if path.is_dir():
        return FolderFrames(path, fps=fps)
    return GifFrames(path, fps=fps)


class FolderFrames:
    """Pictures in a folder, ordered by name, numbers in names by value."""

    def __init__(self, path: Path, *, fps: float | None) -> None:
        """List the frames and take the first one's size."""
        self.path = path
        self._files = _frame_files(path)
        self.count = len(self._files)
        if fps is None:
            raise SchemaError(
                f"{path}: expected frames a second, got none", hint='give the video an "fps"'
            )
        self.fps = fps
        with open_picture(self._files[0]) as first:
            self.size = first.size

    def read(self, places: Sequence[int], *, last: bool) -> "Iterator[Image]":
        """Yield some frames.

        Raises:
            SchemaError: A frame is of another size than the first.
        """
        for place in places:
            with open_picture(self._files[place]) as frame:
                if frame.size != self.size:
                    raise SchemaError(
                        f"{self._files[place]}: expected the first frame's size "
                        f"{self.size[0]} x {self.size[1]}, got {frame.size[0]} x {frame.size[1]}"
                    )
                yield frame


class GifFrames:
    """An animated GIF, decoded from its first frame on; going back starts anew."""

    def __init__(self, path: Path, *, fps: float | None) -> None:
        """Count the frames and add up how long they are shown."""
        self.path = path
        self._open = ExitStack()
        self._next = 0
        self._image: Image | None = None
        with open_picture(path, formats=("GIF",)) as image:
            self.size = image.size
            self.count = int(getattr(image, "n_frames", 1))
            self.fps = _own_fps(image, self.count, path) if fps is None else fps

    def read(self, places: Sequence[int], *, last: bool) -> "Iterator[Image]":
        """Yield some frames; between calls the file stays open, so that none is decoded twice."""
        for place in places:
            if self._image is None or place < self._next:
                self._open.close()
                self._image = self._open.enter_context(open_picture(self.path, formats=("GIF",)))
                self._next = 0
            for between in range(self._next, place + 1):
                _seek(self._image, between, self.path)
            self._next = place
            yield self._image.copy()
        if last:
            self._open.close()
            self._image, self._next = None, 0


def _frame_files(path: Path) -> list[Path]:
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    for file in files:
        if file.suffix.lower() not in FRAME_SUFFIXES:
            raise SchemaError(
                f"{path}: expected only frames named *{', *'.join(FRAME_SUFFIXES)}, got {file.name}"
            )
    if not files:
        raise IncompleteError(f"{path}: expected a folder of frames, got an empty one")
    return sorted(files, key=_by_number)


def _by_number(file: Path) -> tuple[list[tuple[int, str]], str]:
    pieces = re.split(r"([0-9]+)", file.stem)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces], file.name


def _own_fps(image: "Image", count: int, path: Path) -> float:
    milliseconds = 0.0
    for place in range(count):
        _seek(image, place, path)
        shown = image.info.get("duration", 0)
        if not shown > 0:
            raise SchemaError(
                f"{path}: expected frames that say how long they are shown, got none at frame "
                f"{place}",
                hint='give the video an "fps"',
            )
        milliseconds += shown
    return 1000.0 * count / milliseconds


def _seek(image: "Image", place: int, path: Path) -> None:
    try:
        image.seek(place)
    except EOFError as error:
        raise IncompleteError(f"{path}: expected a frame {place}, got the file's end") from error
    decode(image, path)
    check_size(path, image.size)
