"""Lines of text and media to score, from a JSON Lines file.

`{"text": "Seen: <|kimi_image_placeholder|>.", "media": [{"type": "image", "image": "a.png"}]}` is a
line whose text is scored; `{"messages": [...], "answer": "..."}` is one whose answer is. The
placeholder marks where a medium goes, picture or video alike; paths are relative to the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from k3quant.errors import K3QuantError, SchemaError, StructureError
from k3quant.eval.windows import Ids
from k3quant.media.media import MediaSegment, plan_picture, plan_video
from k3quant.media.settings import MediaSettings
from k3quant.models.chat import (
    IMAGE_PLACEHOLDER,
    Control,
    control_id,
    conversation_pieces,
    encode_run,
    image_paths,
)
from k3quant.models.tokenizer import Tokenizer, read_text

MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_PAD, MEDIA_END = "<|media_pad|>", "<|media_end|>"


class _Image(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"
):
    image: str


class _Video(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video"
):
    video: str
    fps: float | None = None


class _TextLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    media: list[_Image | _Video] = []


class _ChatLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] = []
    thinking: bool = True
    thinking_effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLine:
    """A line as the model reads it.

    Attributes:
        number: 1-based line of the file.
        ids: `[T]`; a medium's id stands there once a feature.
        scored: `[T]` whether an id is scored: text of the line, or its answer. Never the first id,
            and nothing of a medium or the words around it.
        is_media: `[T]` whether a feature stands there.
        segments: Pictures and chunks of videos, in order.
    """

    number: int
    ids: Ids
    scored: npt.NDArray[np.bool_]
    is_media: npt.NDArray[np.bool_]
    segments: tuple[MediaSegment, ...] = field(repr=False)


@dataclass(slots=True)
class _Builder:
    """Puts a line's pieces together."""

    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)
    segments: list[MediaSegment] = field(default_factory=list)
    _last_run: str = ""

    def add_control(self, token: str) -> None:
        self._extend([control_id(self.tokenizer, token)], scored=False)
        self._last_run = ""

    def add_run(self, parts: Sequence[str], *, scored: bool) -> None:
        self._extend(encode_run(self.tokenizer, parts), scored=scored)
        self._last_run = "".join(parts)

    def add_medium(self, segments: Sequence[MediaSegment]) -> None:
        # A chunk's time is text like any other, and text may stand right in front of it.
        encode_run(self.tokenizer, [self._last_run, segments[0].stamp])
        for segment in segments:
            self.add_run([segment.stamp], scored=False)
            self.add_control(MEDIA_BEGIN)
            self.add_run([segment.caption], scored=False)
            for token in (MEDIA_CONTENT, MEDIA_PAD, MEDIA_END):
                self.add_control(token)
            self.segments.append(segment)

    def _extend(self, ids: list[int], *, scored: bool) -> None:
        self.ids += ids
        self.scored += [scored] * len(ids)


def read_lines(
    path: Path, tokenizer: Tokenizer, *, settings: MediaSettings | None
) -> tuple[DataLine, ...]:
    """Read a file of text and media.

    Args:
        path: The JSON Lines file; empty lines are skipped.
        tokenizer: The checkpoint's.
        settings: How its pictures become patches; None where it has no vision tower.

    Returns:
        One entry a line.

    Raises:
        StructureError: A line is no JSON, or a picture is broken.
        SchemaError: A line holds other keys, or another number of media than placeholders.
        UsageError: A conversation holds what the vendor's renderings on record do not show.
        K3QuantError: A medium is missing or of no use.
    """
    lines: list[DataLine] = []
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        if not text.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            line = _parse(text)
            media = _media_of(line)
            planned = [_plan(medium, path.parent, settings) for medium in media]
            lines.append(_finish(_build(line, planned, tokenizer), number))
        except K3QuantError as error:
            raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    return tuple(lines)


def expand_media(ids: Ids, counts: Sequence[int], *, media_id: int) -> Ids:
    """Repeat each medium's id once a feature.

    Args:
        ids: `[N]`, one `media_id` a medium.
        counts: Features of each medium.
        media_id: The id that stands for media.

    Returns:
        `[T]`.

    Raises:
        SchemaError: Another number of media than ids that stand for one.
    """
    return np.repeat(ids, _repeats(ids, counts, media_id=media_id))


def _repeats(ids: Ids, counts: Sequence[int], *, media_id: int) -> Ids:
    places = np.flatnonzero(ids == media_id)
    if len(places) != len(counts):
        raise SchemaError(f"media: expected {len(places)} for as many marks, got {len(counts)}")
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = counts
    return repeats


def _parse(text: str) -> _TextLine | _ChatLine:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise StructureError(f"expected JSON, got: {error}") from error
    try:
        if isinstance(document, dict) and "messages" in document:
            return msgspec.convert(document, _ChatLine)
        return msgspec.convert(document, _TextLine)
    except msgspec.ValidationError as error:
        reason = str(error)[0].lower() + str(error)[1:]
        raise SchemaError(
            f"expected keys `text` and `media`, or `messages` and `answer`, got: {reason}"
        ) from error


def _media_of(line: _TextLine | _ChatLine) -> Sequence[_Image | _Video]:
    if isinstance(line, _TextLine):
        return line.media
    return [_Image(image) for image in image_paths(line.messages)]


def _plan(
    medium: _Image | _Video, folder: Path, settings: MediaSettings | None
) -> tuple[MediaSegment, ...]:
    if settings is None:
        raise SchemaError("media: expected a checkpoint with a vision tower, got a text model")
    if isinstance(medium, _Image):
        return plan_picture(folder / medium.image, settings)
    return plan_video(folder / medium.video, settings, fps=medium.fps)


def _build(
    line: _TextLine | _ChatLine,
    media: Sequence[tuple[MediaSegment, ...]],
    tokenizer: Tokenizer,
) -> _Builder:
    text_line = isinstance(line, _TextLine)
    pieces = _text_pieces(line.text) if isinstance(line, _TextLine) else _chat_pieces(line)
    marks = pieces.count(IMAGE_PLACEHOLDER)
    if marks != len(media):
        raise SchemaError(
            f"media: expected {marks} for as many placeholders in the text, got {len(media)}",
            hint=f"`{IMAGE_PLACEHOLDER}` marks where each medium goes",
        )
    built, rest = _Builder(tokenizer), iter(media)
    for kind, run in groupby(pieces, key=_kind_of):
        if kind == "text":
            built.add_run(list(run), scored=text_line)
            continue
        for piece in run:
            if kind == "control":
                built.add_control(piece)
            else:
                built.add_medium(next(rest))
    if isinstance(line, _ChatLine):
        built.add_run([line.answer], scored=True)
    return built


def _chat_pieces(line: _ChatLine) -> list[str]:
    return conversation_pieces(
        line.messages,
        tools=line.tools,
        thinking=line.thinking,
        thinking_effort=line.thinking_effort,
    )


def _text_pieces(text: str) -> list[str]:
    first, *others = text.split(IMAGE_PLACEHOLDER)
    pieces = [first]
    for other in others:
        pieces += [IMAGE_PLACEHOLDER, other]
    return pieces


def _kind_of(piece: str) -> str:
    if piece == IMAGE_PLACEHOLDER:
        return "medium"
    return "control" if isinstance(piece, Control) else "text"


def _finish(built: _Builder, number: int) -> DataLine:
    ids = np.array(built.ids, dtype=np.int64)
    scored = np.array(built.scored, dtype=np.bool_)
    scored[:1] = False
    is_media = np.zeros(len(ids), dtype=np.bool_)
    if built.segments:
        pad = control_id(built.tokenizer, MEDIA_PAD)
        repeats = _repeats(ids, [s.num_tokens for s in built.segments], media_id=pad)
        ids, scored = np.repeat(ids, repeats), np.repeat(scored, repeats)
        is_media = ids == pad
    return DataLine(
        number=number, ids=ids, scored=scored, is_media=is_media, segments=tuple(built.segments)
    )
