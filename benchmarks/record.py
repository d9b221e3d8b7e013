"""What every result carries: commit, hardware, versions, load, and raw samples."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Return where and with what a benchmark ran."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in ("k3quant", "numpy", *packages)},
    }


def samples(work: Callable[[], object], *, runs: int) -> list[float]:
    """Return the wall seconds of each run."""
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def rates(seconds: list[float], amount: int) -> dict[str, Any]:
    """Return median and best GB/s (10^9) of some runs, with the raw seconds."""
    return {
        "seconds": [round(s, 4) for s in seconds],
        "median_gb_s": round(amount / median(seconds) / 1e9, 3),
        "best_gb_s": round(amount / min(seconds) / 1e9, 3),
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result and print it."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text)
    print(text)


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
