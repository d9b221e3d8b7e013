"""How fast `repack` copies, against `cp` of the same bytes on the same disk.

Every round measures, one after the other and each from a source that is not in the page cache:

  cp             `cp -r`, as a process
  cp_synced      `cp -r`, then every file and the folder synced, as repack does with its outputs
  repack_size    files of another size: every tensor copied, hashed, synced
  repack_keep    the same files again: what a plain copy would do

A repack also writes its index and journal, hashes every output and syncs it; `cp` does none of
that. The source has the released widths: two layers with a tenth of their experts. Results go to
benchmarks/results/repack.json. Run: `python benchmarks/bench_repack.py`.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import environment, rates, save

from k3quant.manifest import load_config
from k3quant.synth.run import synth

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = 96
QUIET = 0.95  # idle part of the processors
REPACKS = ("repack_size", "repack_keep")

REPACK = """
import json, resource, sys, time
from pathlib import Path
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings
layout, limit = sys.argv[3], int(sys.argv[4])
settings = (RepackSettings(max_shard_bytes=limit) if layout == "size"
            else RepackSettings(layout=Layout(layout)))
began = time.perf_counter()
report = run_repack(Path(sys.argv[1]), Path(sys.argv[2]), settings)
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss would count the program that forked this one
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps({"seconds": time.perf_counter() - began,
                  "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_rss_bytes": peak * 1024,
                  "bytes": report.summary["file_bytes"],
                  "copied_by": report.summary["copied_by"]}))
"""


def make_source(folder: Path) -> int:
    """Write a checkpoint of released widths and return the bytes of its shards."""
    config = load_config("kimi-k3")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config["text_config"] |= {"vocab_size": 16384} | ids
    config |= ids
    del config["vision_config"]
    report = synth(config, folder, sparse=False, layers=(1, 2), experts=(0, EXPERTS - 1))
    return int(report.summary["file_bytes"])


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_for_quiet(seconds: float) -> float:
    """Wait until the processors are idle for two seconds, at most so long; return their idle part.

    Others work on the machine too; a sample says how busy it was when it began.
    """
    deadline = time.monotonic() + seconds
    while True:
        before = processor_times()
        time.sleep(2)
        after = processor_times()
        idle = (after[0] - before[0]) / max(after[1] - before[1], 1)
        if idle > QUIET or time.monotonic() > deadline:
            return round(idle, 3)


def processor_times() -> tuple[int, int]:
    """Return idle and total time of all processors, in ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def copy_with_cp(source: Path, out: Path, *, synced: bool) -> dict[str, Any]:
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", source, out], check=True)
    if synced:
        sync_all(out)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu}


def repack(source: Path, out: Path, layout: str, limit: int) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", REPACK, source, out, layout, str(limit)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    measured: dict[str, Any] = json.loads(run.stdout)
    return measured


def measure(
    source: Path, work: Path, size: int, *, rounds: int, patience: float
) -> dict[str, list[dict[str, Any]]]:
    ways: dict[str, Callable[[Path], dict[str, Any]]] = {
        "cp": lambda out: copy_with_cp(source, out, synced=False),
        "cp_synced": lambda out: copy_with_cp(source, out, synced=True),
        "repack_size": lambda out: repack(source, out, "size", 1_000_000_000),
        "repack_keep": lambda out: repack(source, out, "keep", 0),
    }
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    ways["cp"](work / "out")  # the first copy pays for memory that nobody used yet
    shutil.rmtree(work / "out")
    for number in range(rounds):
        # Another order each round, so that no way always follows the same one.
        for name in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
            out = work / "out"
            forget(source)
            os.sync()
            idle = wait_for_quiet(patience)
            sample = ways[name](out) | {"idle_before": idle, "load_average": os.getloadavg()[0]}
            samples[name].append(sample)
            print(f"{number} {name}: {size / sample['seconds'] / 1e9:.2f} GB/s")
            forget(out)
            shutil.rmtree(out)
            os.sync()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=None, help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--patience", type=float, default=30, help="seconds to wait for a quiet machine"
    )
    arguments = parser.parse_args()
    where = environment()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        source = Path(folder) / "source"
        began = time.perf_counter()
        size = make_source(source)
        synth_seconds = time.perf_counter() - began
        taken = measure(
            source, Path(folder), size, rounds=arguments.rounds, patience=arguments.patience
        )
    speeds = {name: rates([s["seconds"] for s in runs], size) for name, runs in taken.items()}
    repacks = [sample for name in REPACKS for sample in taken[name]]
    save(
        "repack",
        {
            **where,
            "source_bytes": size,
            "synth_gb_s": round(size / synth_seconds / 1e9, 3),
            "rates": speeds,
            "ratios": {
                f"{way} / {reference}": {
                    kind: round(speeds[way][kind] / speeds[reference][kind], 3)
                    for kind in ("median_gb_s", "best_gb_s")
                }
                for way in REPACKS
                for reference in ("cp", "cp_synced")
            },
            "peak_rss_bytes": max(sample["peak_rss_bytes"] for sample in repacks),
            "samples": taken,
        },
    )


if __name__ == "__main__":
    main()
