"""Features of pictures and videos: the tower a block at a time, all media of a group together.

What is kept between blocks is one activation a patch; pixels are dropped once they are embedded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.eval.finite import count_non_finite, refuse_non_finite
from k3quant.eval.media_weights import VisionWeights
from k3quant.models.tap import Tap
from k3quant.models.vision import embed_patches, finish_tower, vision_block
from k3quant.models.vision_grid import Grid, check_grid
from k3quant.models.vision_positions import rotary_of
from k3quant.progress import SILENT, Progress

GROUP_PATCHES = 1 << 17  # 512 MiB of float32 activations of the full tower


class Segment(Protocol):
    """A picture, or a chunk of a video."""

    @property
    def grid(self) -> Grid:
        """Its patches."""

    def pixels(self) -> npt.NDArray[np.float32]:
        """Return `[n, 3, patch, patch]`."""


def media_features(
    weights: VisionWeights,
    segments: Sequence[Segment],
    *,
    tap: Tap | None = None,
    progress: Progress = SILENT,
) -> Iterator[Tensor]:
    """Yield the features of each segment, in order.

    Segments are taken in groups of up to `GROUP_PATCHES` patches, at least one; each group reads
    the tower once.

    Args:
        weights: The tower and projector.
        segments: What to look at.
        tap: Receives intermediates of one segment: `patch_embed`, `block0` and so on.
        progress: Is told about each group.

    Yields:
        `[tokens, D]` in the weights' dtype, on their device.

    Raises:
        SchemaError: A segment's grid does not fit the tower.
        ValuesError: An activation is not finite; names the block and the tensor.
        ValueError: A tap and several segments.
    """
    if tap is not None and len(segments) != 1:
        raise ValueError(f"tap: expected one segment, got {len(segments)}")
    for segment in segments:
        check_grid(segment.grid, weights.vision)
    rest = iter(segments)
    for count in _group_counts(segments):
        progress.note("pictures")
        yield from _run_group(weights, list(islice(rest, count)), tap)


def _group_counts(segments: Sequence[Segment]) -> Iterator[int]:
    count = patches = 0
    for segment in segments:
        if count and patches + segment.grid.num_patches > GROUP_PATCHES:
            yield count
            count = patches = 0
        count += 1
        patches += segment.grid.num_patches
    if count:
        yield count


def _run_group(
    weights: VisionWeights, group: Sequence[Segment], tap: Tap | None
) -> Iterator[Tensor]:
    with closing(weights.walk()) as walk:
        yield from _walk(weights, walk, group, tap)


def _walk(
    weights: VisionWeights,
    walk: Iterator[Mapping[str, Tensor]],
    group: Sequence[Segment],
    tap: Tap | None,
) -> Iterator[Tensor]:
    vision, device = weights.vision, weights.device
    head_dim = vision.qkv_hidden_size // vision.num_attention_heads
    first = next(walk)
    streams = [
        embed_patches(torch.from_numpy(segment.pixels()).to(device), segment.grid, first)
        for segment in group
    ]
    del first
    _report(tap, "patch_embed", streams)
    _check(weights, 0, "the patch embedding", streams)
    for block in range(vision.num_hidden_layers):
        own = next(walk)
        for place, segment in enumerate(group):
            rotary = rotary_of(segment.grid, head_dim, device=device)
            streams[place] = vision_block(streams[place], own, rotary, vision)
        _report(tap, f"block{block}", streams)
        _check(weights, block + 1, f"vision block {block}", streams)
    last = next(walk)
    for place, segment in enumerate(group):
        out = finish_tower(streams[place], segment.grid, last, vision, tap=tap)
        _check(weights, vision.num_hidden_layers + 1, "the projector", [out])
        yield out


def _report(tap: Tap | None, name: str, streams: Sequence[Tensor]) -> None:
    if tap is not None:
        tap(name, streams[0])


def _check(weights: VisionWeights, place: int, where: str, streams: Sequence[Tensor]) -> None:
    found = sum(count_non_finite(stream) for stream in streams)
    refuse_non_finite(found, lambda: weights.find_non_finite(place), where)
