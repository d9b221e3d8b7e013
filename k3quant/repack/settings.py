"""What a repack is asked for."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from k3quant.checkpoint.shards import RANK_FILE_BYTES
from k3quant.errors import UsageError

Span = tuple[int, int]
"""First and last index, both included, counted from 0."""


class Layout(StrEnum):
    """Which tensors lie together in one file."""

    KEEP = "keep"  # as in the source
    SIZE = "size"
    LAYER = "layer"
    RANK = "expert-rank"
    ORIGINAL = "original"  # as released: a file a layer, then globals, projector, vision


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackSettings:
    """Settings of a repack.

    Attributes:
        layout: Which tensors lie together; None takes `SIZE` with a size limit, `ORIGINAL` for a
            cut, else `KEEP`.
        ranks: Expert-parallel ranks, for `RANK` alone.
        max_shard_bytes: Most bytes of a file; None is 20 GB for `RANK`, elsewhere no limit.
        layers: Decoder layers to cut out, None for all.
        experts: Routed experts to cut out of each layer, None for all.
        align: Data sections start at a multiple of this many bytes, itself a multiple of 8.
        link: Hard-link files that stay byte for byte what they are, instead of copying.
        rebuild_index: Trust the headers of the files and not the source's index.
        in_place: Write into the source's folder and remove its shards on the way.
    """

    layout: Layout | None = None
    ranks: int | None = None
    max_shard_bytes: int | None = None
    layers: Span | None = None
    experts: Span | None = None
    align: int = 8
    link: bool = False
    rebuild_index: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        if (self.ranks is not None) != (self.layout is Layout.RANK):
            raise UsageError(
                f"layout: expected a number of ranks with `expert-rank` alone, got "
                f"`{self.layout}` and {self.ranks}",
                hint="write `--by expert-rank:8`",
            )
        if self.layout is Layout.SIZE and self.max_shard_bytes is None:
            raise UsageError("layout: expected a size limit for files by size, got none")
        fixed = self.layout in (Layout.ORIGINAL, Layout.KEEP)
        if fixed and self.max_shard_bytes is not None:
            raise UsageError(
                f"layout: expected no size limit for `{self.layout}`, got {self.max_shard_bytes}",
                hint="leave out one of `--by` and `--max-shard-size`",
            )
        if self.max_shard_bytes is not None and self.max_shard_bytes <= 0:
            raise UsageError(f"size limit: expected at least 1 byte, got {self.max_shard_bytes}")
        if self.align < 8 or self.align % 8:
            raise UsageError(f"align: expected a multiple of 8 bytes, got {self.align}")
        for what, span in (("layers", self.layers), ("experts", self.experts)):
            if span is not None and not 0 <= span[0] <= span[1]:
                raise UsageError(f"{what}: expected FIRST-LAST from 0 on, got {span[0]}-{span[1]}")
        if self.in_place and self.is_cut:
            raise UsageError(
                "in place: expected all layers and experts, got a cut, which would remove tensors",
                hint="write the cut into a folder of its own with `--out`",
            )

    @property
    def is_cut(self) -> bool:
        """Whether tensors are left out."""
        return self.layers is not None or self.experts is not None

    @property
    def chosen_layout(self) -> Layout:
        """The layout with its default resolved."""
        if self.layout is not None:
            return self.layout
        if self.max_shard_bytes is not None:
            return Layout.SIZE
        return Layout.ORIGINAL if self.is_cut else Layout.KEEP

    @property
    def file_limit(self) -> int | None:
        """The limit of a file's size with its default resolved."""
        if self.max_shard_bytes is None and self.layout is Layout.RANK:
            return RANK_FILE_BYTES
        return self.max_shard_bytes

    def parameters(self) -> dict[str, Any]:
        """Return what decides the outputs' bytes, as the resume record keeps it."""
        return {
            "layout": str(self.chosen_layout),
            "ranks": self.ranks,
            "max_shard_bytes": self.file_limit,
            "layers": self.layers,
            "experts": self.experts,
            "align": self.align,
            "link": self.link,
            "rebuild_index": self.rebuild_index,
            "in_place": self.in_place,
        }


def parse_layout(text: str) -> tuple[Layout, int | None]:
    """Read `layer`, `original`, `keep` or `expert-rank:N`.

    Raises:
        UsageError: It is none of these.
    """
    word, _, count = text.partition(":")
    if word == Layout.RANK and count.isascii() and count.isdigit() and int(count) > 0:
        return Layout.RANK, int(count)
    if text in (Layout.LAYER, Layout.ORIGINAL, Layout.KEEP):
        return Layout(text), None
    raise UsageError(
        f"layout: expected `layer`, `original`, `keep` or `expert-rank:N`, got `{text}`"
    )


def parse_span(text: str, *, what: str) -> Span:
    """Read `3-7` or `3` as first and last index.

    Args:
        text: The text.
        what: What is counted, for the message.

    Raises:
        UsageError: It is no such range.
    """
    first, dash, last = text.partition("-")
    parts = (first, last if dash else first)
    if not all(part.isascii() and part.isdigit() for part in parts) or int(first) > int(parts[1]):
        raise UsageError(f"{what}: expected FIRST-LAST such as `0-7`, got `{text}`")
    return int(parts[0]), int(parts[1])
