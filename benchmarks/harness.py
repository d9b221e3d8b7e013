"""Times work on a GPU with events and keeps every sample, beside the copy bandwidth of the run."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from record import environment

COPY_BYTES = 4 << 30
WARM_SECONDS = 0.15
"""Work before the first sample: after idling, a GPU runs a tenth slower for about 45 ms."""


def gpu_environment(*packages: str) -> dict[str, Any]:
    """Return `environment` with the GPU; K3QUANT_COMMIT names the commit of a tree without git."""
    found = environment("torch", "triton", *packages)
    found["commit"] = os.environ.get("K3QUANT_COMMIT") or found["commit"]
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def cuda_samples(work: Callable[[], object], *, runs: int) -> tuple[list[float], dict[str, float]]:
    """Time runs between two events on the stream, after warming up.

    Returns:
        The seconds of each run; the clock and the power draw while the last runs were under way.
    """
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    once = time.perf_counter() - began
    for _ in range(int(WARM_SECONDS / once)):
        work()
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    edges[0].record()
    for edge in edges[1:]:
        work()
        edge.record()
    state = {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3}
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(edges)], state


class Meter:
    """Measures, prints a line each and writes the file after every row, so that none gets lost."""

    def __init__(
        self, path: Path, *, runs: int, copy_bytes: int = COPY_BYTES, packages: tuple[str, ...] = ()
    ) -> None:
        self.path, self.runs = path, runs
        self.result: dict[str, Any] = {
            "environment": gpu_environment(*packages),
            "copy": [],
            "tuned": {},
            "rows": [],
            "failed": [],
        }
        self._source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device="cuda")
        self._target = torch.empty_like(self._source)

    def copy_bandwidth(self) -> float:
        """Measure a device-to-device copy again; return bytes read and written a second."""
        seconds, state = cuda_samples(lambda: self._target.copy_(self._source), runs=self.runs)
        moved = 2 * self._source.numel()
        self.result["copy"].append({"bytes": moved, "seconds": seconds, **state})
        return self.copy

    @property
    def copy(self) -> float:
        """Median copy bandwidth of the run so far."""
        rows = self.result["copy"]
        return rows[0]["bytes"] / median(s for row in rows for s in row["seconds"])

    def bandwidth(self, name: str, work: Callable[[], object], moved: int, **facts: Any) -> float:
        """Measure work that reads and writes `moved` bytes; return its share of the copy."""
        seconds, state = cuda_samples(work, runs=self.runs)
        rate = moved / median(seconds)
        share = rate / self.copy
        self._add(name, seconds, facts | state, bytes=moved, gb_s=rate / 1e9, share_of_copy=share)
        return share

    def compute(
        self, name: str, work: Callable[[], object], operations: int, **facts: Any
    ) -> float:
        """Measure work of so many floating-point operations; return TFLOP/s."""
        seconds, state = cuda_samples(work, runs=max(3, self.runs // 4))
        rate = operations / median(seconds) / 1e12
        self._add(name, seconds, facts | state, operations=operations, tflop_s=rate)
        return rate

    def guarded(self, name: str, part: Callable[[], None]) -> None:
        """Run one part; what fails is recorded and does not stop the others."""
        began = time.perf_counter()
        try:
            part()
        except Exception as error:
            self.result["failed"].append({"part": name, "error": repr(error)[:600]})
            print(f"FAILED {name}: {error!r:.600}", flush=True)
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
        self.save()

    def save(self) -> None:
        """Write everything measured so far."""
        if self.result["copy"] and torch.cuda.is_available():
            self.result["copy_gb_s"] = self.copy / 1e9
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def _add(self, name: str, seconds: list[float], facts: dict[str, Any], **rates: Any) -> None:
        row = {"name": name, **facts, "ms": median(seconds) * 1e3, **rates, "seconds": seconds}
        self.result["rows"].append(row)
        words = [f"{k}={v}" for k, v in facts.items()]
        words += [f"{k}={v:.3f}" for k, v in rates.items() if isinstance(v, float)]
        print(f"{name:28s} {median(seconds) * 1e3:9.3f} ms  {' '.join(words)}", flush=True)


@contextmanager
def constants(module: ModuleType, **values: Any) -> Iterator[None]:
    """Set a kernel module's constants for a while: block sizes, warps, stages."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
