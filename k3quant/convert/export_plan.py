"""What an export will write, decided before a byte of data is read.

A scheme makes an `ExportPlan`; the engine runs it without knowing the scheme.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k3quant.checkpoint.output_file import Buffer
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.proof import WeightProof

Write = Callable[[str, int, Buffer], None]
"""Writes bytes of an output tensor, at an offset from the tensor's beginning."""


class Unit(Protocol):
    """Source tensors that are converted together: an expert, a fused group, a single tensor."""

    @property
    def sources(self) -> Sequence[str]:
        """Names of the source tensors it reads."""

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Read, convert, write, and say what was kept and lost.

        Memory is bounded by the unit's largest tensor times a small constant. Called from any
        thread; units of one file run in order, files in parallel.

        Raises:
            K3QuantError: A read failed, or a value cannot be represented.
        """


def unit_bytes(checkpoint: Checkpoint, unit: Unit) -> int:
    """Return the bytes of a unit's source tensors."""
    return sum(checkpoint.entry(name).length for name in unit.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One output file.

    Attributes:
        name: File name below the output folder.
        header: Its first bytes, up to where tensors begin.
        places: First and last-plus-one byte of each output tensor, counted from the file's start.
        file_bytes: Size of the whole file; bytes that no tensor covers are zero.
        units: What fills it.
    """

    name: str
    header: bytes
    places: Mapping[str, tuple[int, int]]
    file_bytes: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a dry run says of one family under one format.

    Attributes:
        family: Family of the table.
        target: Format.
        tensors: Source matrices.
        source_bytes: Bytes they take now.
        target_bytes: Bytes they will take.
    """

    family: str
    target: str
    tensors: int
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Everything an export writes.

    Attributes:
        target: Name of the target format or recipe.
        scheme: Name of the scheme.
        files: Weight files.
        documents: Small files that are written once the weights are whole, such as config.json;
            the index comes last.
        sidecars: Source files that are copied as they are.
        skipped: Source tensors that have no place in the target, with the reason.
        transforms: Changes of value or layout that the target asks for, by kind.
        forecasts: What a dry run prints.
    """

    target: str
    scheme: str
    files: tuple[FilePlan, ...]
    documents: Mapping[str, bytes]
    sidecars: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    transforms: Mapping[str, str] = field(default_factory=dict)
    forecasts: tuple[Forecast, ...] = ()
