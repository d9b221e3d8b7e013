"""A walk's durable state: after each layer everything that is needed to go on lies in a folder.

A layer's file holds each stream's prefix and the sums so far; a block of attention residuals is
written once, when it appears. Files are synced and renamed before the journal names them, so a
crash at any moment leaves the state before a layer or after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from k3quant.checkpoint.journal import Job, Journal, open_journal
from k3quant.checkpoint.writer import PARTIAL_SUFFIX
from k3quant.errors import IncompleteError
from k3quant.eval.lockstep import Beginning
from k3quant.eval.tensor_file import read_tensors, write_tensors
from k3quant.models.residual import Residual

SUMS = "sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A state that was read back.

    Attributes:
        beginning: Where to go on.
        sums: What was added up so far, float64.
    """

    beginning: Beginning
    sums: Tensor


class WalkState:
    """The open state of an evaluation, for use in a `with`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._folder = journal.folder
        self._blocks: dict[str, int] = {}
        for path in self._folder.glob(f"*{PARTIAL_SUFFIX}"):
            path.unlink()

    def __enter__(self) -> "WalkState":
        return self

    def __exit__(self, *error: Any) -> None:
        self._journal.__exit__(*error)

    def finished(self, number: int) -> dict[str, Tensor] | None:
        """Return the scores and `sums` of a pass that ended; None where it did not."""
        if _pass_file(number) not in self._journal.finished:
            return None
        return read_tensors(self._folder / _pass_file(number))

    def begun(self, number: int) -> Saved | None:
        """Return the state after the last layer of a pass that was broken off, None without one.

        Raises:
            IncompleteError: A file of the state is gone.
        """
        self._blocks = {}
        layers = {
            output.details["layer"]: file
            for file, output in self._journal.finished.items()
            if output.details.get("pass") == number and "layer" in output.details
        }
        if not layers:
            return None
        last = max(layers)
        details = self._journal.finished[layers[last]].details
        tensors = read_tensors(self._folder / layers[last])
        sums = tensors.pop(SUMS)
        residuals = {}
        for name, prefix in tensors.items():
            count = self._blocks[name] = details["blocks"][name]
            blocks = tuple(self._block(number, name, place) for place in range(count))
            residuals[name] = Residual(prefix, blocks)
        return Saved(beginning=Beginning(layer=last + 1, residuals=residuals), sums=sums)

    def save(
        self,
        number: int,
        layer: int,
        residuals: Mapping[str, Residual],
        *,
        tokens: int,
        sums: Tensor,
    ) -> None:
        """Make the state after a layer durable, and drop the one before.

        Args:
            number: 0-based pass.
            layer: 0-based layer that is done.
            residuals: Each stream, `[copies * N, D]`; only its first copy is kept.
            tokens: N.
            sums: What was added up so far, float64.

        Raises:
            ResourceError: The disk is full or failed.
        """
        for name, residual in residuals.items():
            for place in range(self._blocks.get(name, 0), len(residual.blocks)):
                written = write_tensors(
                    self._folder / _block_file(number, name, place),
                    {"block": residual.blocks[place][:tokens]},
                )
                self._journal.record(written, details={"pass": number})
            self._blocks[name] = len(residual.blocks)
        prefixes = {name: residual.prefix[:tokens] for name, residual in residuals.items()}
        file = _layer_file(number, layer)
        written = write_tensors(self._folder / file, prefixes | {SUMS: sums})
        blocks = {name: len(residual.blocks) for name, residual in residuals.items()}
        self._journal.record(written, details={"pass": number, "layer": layer, "blocks": blocks})
        self._drop(number, layer=layer)

    def finish(self, number: int, scores: Mapping[str, Tensor], *, sums: Tensor) -> None:
        """Keep a pass's scores and drop its streams.

        Raises:
            ResourceError: The disk is full or failed.
        """
        written = write_tensors(self._folder / _pass_file(number), {**scores, SUMS: sums})
        self._journal.record(written)
        self._blocks = {}
        self._drop(number, layer=None)

    def _block(self, number: int, name: str, place: int) -> Tensor:
        file = _block_file(number, name, place)
        if file not in self._journal.finished:
            raise IncompleteError(
                f"{self._folder}: expected {file} of the saved state, got none of its size",
                hint="name a new folder; the walk then begins with the first layer",
            )
        return read_tensors(self._folder / file)["block"]

    def _drop(self, number: int, *, layer: int | None) -> None:
        """Remove a pass's files but those of a layer, and of no other pass."""
        for file, output in list(self._journal.finished.items()):
            details = output.details
            if details.get("pass") != number:
                continue
            if layer is None or details.get("layer", layer) != layer:
                (self._folder / file).unlink(missing_ok=True)
                del self._journal.finished[file]


def open_state(folder: Path, job: Job) -> WalkState:
    """Open the state of an evaluation, or start one in an empty folder.

    Raises:
        RefusedError: The folder holds files of no evaluation or of another one, whose checkpoint,
            ids or options differ, or one is at work there.
        StructureError: The journal is damaged before its last line.
        ResourceError: The folder cannot be written.
    """
    return WalkState(open_journal(folder, job))


def _layer_file(number: int, layer: int) -> str:
    return f"pass-{number}-layer-{layer:03}.safetensors"


def _block_file(number: int, name: str, place: int) -> str:
    return f"pass-{number}-{name}-block-{place}.safetensors"


def _pass_file(number: int) -> str:
    return f"pass-{number}.safetensors"
