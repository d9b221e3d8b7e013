"""Walks models side by side, a layer at a time, on the same ids.

A candidate may be walked twice in one go: free, and beside it a copy whose stream is replaced
before every layer by the reference's, so that the layer's own error shows (teacher forcing).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3quant.eval.executor import Start, walk_layers
from k3quant.eval.source import Model
from k3quant.eval.windows import Ids
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap
from k3quant.progress import SILENT, Progress

CANDIDATE, REFERENCE, TWIN = "candidate", "reference", "twin"
WATCHED = frozenset({"attn_out", "mlp_out", "topk_ids"})


@dataclass(slots=True, kw_only=True)
class Walker:
    """One model that is walked.

    Attributes:
        model: The model.
        copies: 2 where a copy of the tokens is fed with the reference's stream.
        watched: Whether its halves' outputs and its router are handed out.
        around: Entered while it computes.
    """

    model: Model
    copies: int = 1
    watched: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    _last: dict[str, Tensor] = field(default_factory=dict)

    def tap(self, name: str, value: Tensor) -> None:
        """Keep what is watched of the layer that runs."""
        short = name.rpartition(".")[2]
        if short in WATCHED:
            self._last[short] = value

    def walk(
        self, inputs: Sequence[Ids], start: Start | None, progress: Progress
    ) -> Generator[Residual, Tensor | None]:
        """Begin its walk."""
        tap: Tap | None = self.tap if self.watched else None
        return walk_layers(
            self.model,
            inputs,
            mlp_tap=tap,
            attn_tap=tap,
            progress=progress,
            copies=self.copies,
            start=start,
        )

    def take(self, residual: Residual) -> dict[str, Tensor]:
        """Return the stream and what was kept of the last layer, and forget the latter."""
        kept, self._last = self._last, {}
        return kept | {"stream": residual.prefix}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one layer did; emptied when the next one begins, so that streams never pile up.

    Attributes:
        layer: 0-based layer.
        residuals: Each walker's stream after it, `[copies * N, D]`.
        seen: By walker: `stream`, and where it is watched `attn_out`, `mlp_out`, `topk_ids`.
    """

    layer: int
    residuals: dict[str, Residual]
    seen: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a walk begins that was broken off.

    Attributes:
        layer: The first layer to run.
        residuals: Each walker's stream before it, `[N, D]`, one copy.
    """

    layer: int
    residuals: Mapping[str, Residual]

    def of(self, name: str, walker: Walker) -> Start:
        """Return a walker's own start; the copy begins with the reference's stream."""
        residual = self.residuals[name]
        if walker.copies == 2:
            residual = _beside(residual, self.residuals[REFERENCE])
        return Start(layer=self.layer, residual=residual)


def walk_together(
    walkers: Mapping[str, Walker],
    inputs: Sequence[Ids],
    *,
    beginning: Beginning | None = None,
    progress: Progress = SILENT,
) -> Generator[Step]:
    """Run windows through all walkers, one layer of each after the other.

    Args:
        walkers: The walkers, by name.
        inputs: Ids of each window.
        beginning: Where to begin; None is the first layer.
        progress: Is told about each layer of each walker.

    Yields:
        First the state before the first layer, under the number of the layer before (-1 for the
        embedding), then each layer.

    Raises:
        ValuesError: A stream is no longer finite.
    """
    first = beginning.layer if beginning else 0
    last = next(iter(walkers.values())).model.config.num_hidden_layers
    with ExitStack() as stack:
        walks = {
            name: stack.enter_context(
                closing(
                    walker.walk(inputs, beginning.of(name, walker) if beginning else None, progress)
                )
            )
            for name, walker in walkers.items()
        }
        residuals: dict[str, Residual] = {}
        for name, walk in walks.items():
            with walkers[name].around():
                residuals[name] = next(walk)
        step = _step(first - 1, walkers, residuals)
        yield step
        for layer in range(first, last):
            theirs = residuals[REFERENCE].prefix if REFERENCE in residuals else None
            step.residuals.clear()
            step.seen.clear()
            for name, walk in walks.items():
                with walkers[name].around():
                    residuals[name] = walk.send(theirs if walkers[name].copies == 2 else None)
            del theirs
            step = _step(layer, walkers, residuals)
            yield step


def _step(layer: int, walkers: Mapping[str, Walker], residuals: Mapping[str, Residual]) -> Step:
    seen = {name: walkers[name].take(residual) for name, residual in residuals.items()}
    return Step(layer=layer, residuals=dict(residuals), seen=seen)


def _beside(ours: Residual, theirs: Residual) -> Residual:
    joined = [
        torch.cat(both)
        for both in zip((ours.prefix, *ours.blocks), (theirs.prefix, *theirs.blocks), strict=True)
    ]
    return Residual(joined[0], tuple(joined[1:]))
