"""How long an export will take here: one unit of each kind run for real, one file written.

Nothing is guessed from a table of machines. Each kind of unit is run once to warm up and once to be
timed, its output thrown away; the disk writes and syncs a file; sha256 is timed alone. What cannot
be known beforehand is how fast a cold source reads.
"""

import hashlib
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from k3quant.checkpoint.output_file import Buffer, OutputFile, free_bytes
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import ExportPlan, Unit, unit_bytes
from k3quant.verify.stream import default_jobs

_WRITE_BYTES = 256 << 20
_HASH_BYTES = 64 << 20
# A smaller unit would show the cost of a call, not of its bytes.
_TYPICAL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds an export will take.

    Attributes:
        seconds: The whole: processors and disk work at the same time, so the slower of both.
        processor_seconds: Converting and hashing, divided among the jobs.
        disk_seconds: Writing, at the measured rate.
        disk_bytes_per_second: That rate.
        jobs: Files written at once.
    """

    seconds: float
    processor_seconds: float
    disk_seconds: float
    disk_bytes_per_second: float
    jobs: int


def estimate(
    checkpoint: Checkpoint, plan: ExportPlan, out: Path, *, jobs: int | None, hash_source: bool
) -> Estimate:
    """Measure this machine on parts of an export.

    Args:
        checkpoint: The source.
        plan: The export.
        out: Where it will be written; its nearest existing folder gets a file that is removed.
        jobs: Files written at once; None takes the processors.
        hash_source: Whether every source shard will be hashed.

    Raises:
        K3QuantError: A unit could not be read or converted, or the disk refused.
    """
    kinds: dict[tuple[str, str], list[Unit]] = defaultdict(list)
    for unit in (unit for file in plan.files for unit in file.units):
        kinds[type(unit).__name__, getattr(unit, "family", "")].append(unit)
    work = sum(_seconds_of(checkpoint, units) for units in kinds.values())
    target_bytes = sum(file.file_bytes for file in plan.files)
    hashed = target_bytes
    if hash_source:
        hashed += sum(header.file_bytes for header in checkpoint.headers.values())
    work += hashed * _hash_seconds_per_byte()
    workers = min(jobs or default_jobs(), len(plan.files))
    rate = _disk_rate(out)
    processor, disk = work / workers, target_bytes / rate
    return Estimate(
        seconds=max(processor, disk),
        processor_seconds=processor,
        disk_seconds=disk,
        disk_bytes_per_second=rate,
        jobs=workers,
    )


def _seconds_of(checkpoint: Checkpoint, units: list[Unit]) -> float:
    """Return the seconds of all units of a kind, by the bytes of one that was timed."""

    def drop(tensor: str, offset: int, buffer: Buffer) -> None:
        """Throw away what was made."""

    sizes = [(unit_bytes(checkpoint, unit), place) for place, unit in enumerate(units)]
    size, place = min((s for s in sizes if s[0] >= _TYPICAL_BYTES), default=max(sizes))
    units[place].run(checkpoint, drop)
    began = time.perf_counter()
    units[place].run(checkpoint, drop)
    taken = time.perf_counter() - began
    return taken / max(size, 1) * sum(size for size, _ in sizes)


def _hash_seconds_per_byte() -> float:
    data = bytes(_HASH_BYTES)
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return (time.perf_counter() - began) / _HASH_BYTES


def _disk_rate(out: Path) -> float:
    folder = next(place for place in (out, *out.absolute().parents) if place.is_dir())
    size = min(_WRITE_BYTES, free_bytes(folder) // 2)
    # Random bytes, because some file systems compress
    block = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".k3quant-") as scratch:
        began = time.perf_counter()
        with OutputFile(Path(scratch) / "rate", size=size, digest=False) as file:
            for offset in range(0, size, len(block)):
                file.write_at(offset, block[: size - offset])
        return size / (time.perf_counter() - began)
