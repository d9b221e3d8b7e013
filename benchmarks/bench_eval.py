"""The whole walk of Kimi-K3 on one GPU, from a few full-size layers that stand for all 93.

    python benchmarks/bench_eval.py make FOLDER
    python benchmarks/bench_eval.py limit FOLDER --out R.json
    python benchmarks/bench_eval.py walk FOLDER --runs 16384:4096 16384:4096:20GB:40GB --out R.json
    python benchmarks/bench_eval.py cold FOLDER --out R.json
    python benchmarks/bench_eval.py processor FOLDER --out benchmarks/results/eval-cpu.json
    python benchmarks/bench_eval.py collect R.json... --results benchmarks/results/eval-h200.json

`make` writes seeded layers of the released widths: layer 0 (dense), layer 2 (KDA and experts) and
layer 3 (MLA and experts), embedding and head. `walk` opens them as a checkpoint of 93 layers: each
layer's entries lead to the bytes of its kind, nothing is copied, and every byte is read from the
page cache as often as the release would be read from a disk. `limit` is a plain loop of threads
that reads the same files into pinned memory and copies them to the GPU, with the best of several
lengths of a read. `cold` empties the page cache (as root) and takes a layer of experts as the walk
does, beside `dd` of as cold a file; it computes nothing, so it needs no GPU, only the disk.
`processor` evaluates five ids on a sparse checkpoint of the released size, 1.56 TB of holes,
without a GPU: what a walk costs in memory and in everything but the disk. All ids choose the same
experts.

Seconds are wall time from the first embedding row to the last loss, after five layers that compile
and tune the kernels. GFLOP count products of the
active parameters and attention's scores.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import gpu_environment
from record import RESULTS, environment

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import Checkpoint, TensorEntry, open_checkpoint
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.executor import finish, scored_rows, walk_layers
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.windows import plan_windows
from k3quant.manifest import load_config
from k3quant.models.k3_config import LayerKind, read_config
from k3quant.models.k3_counts import count_model
from k3quant.models.k3_tensors import TensorSpec, layer_tensors, shard_tensors
from k3quant.sizes import parse_size
from k3quant.synth.run import synth

PARTS = {"dense": (0, 0), "moe": (2, 3)}
THREADS = 16
WARM_LAYERS = 5  # every kind of layer once: kernels are compiled and tuned
PIECES = (8 << 20, 16 << 20, 32 << 20)
COLD_BYTES = 4 << 30
COLD_ARENA_BYTES = 9_000_000_000
COLD_TOKENS = 4096
PROCESSOR = """
import sys
from pathlib import Path
from k3quant.cli.main import app
try:
    app(["eval", sys.argv[1], "--tokens", sys.argv[2], "--dtype", "bfloat16", "--json"])
except SystemExit as end:
    assert not end.code, end.code
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
"""
COLD_LAYERS = (2, 3)  # one of each kind with experts, so that nothing is read twice


def make(folder: Path, experts: int | None) -> None:
    """Write the layers; a number of experts makes a small stand-in to try the script with."""
    config = load_config("kimi-k3")
    for name, layers in PARTS.items():
        began = time.perf_counter()
        report = synth(
            config, folder / name, sparse=False, layers=layers, jobs=THREADS,
            experts=None if experts is None else (0, experts - 1),
        )  # fmt: skip
        size = report.summary["file_bytes"]
        print(f"{name}: {size / 1e9:.1f} GB in {time.perf_counter() - began:.1f} s", flush=True)


def replayed(folder: Path) -> Checkpoint:
    """Return a checkpoint of all layers whose entries lead to the few that exist."""
    parts = {name: open_checkpoint(folder / name) for name in PARTS}
    full = load_config("kimi-k3")
    del full["vision_config"]
    small = parts["moe"].config
    for key in ("num_experts", "num_experts_per_token"):
        full["text_config"][key] = small["text_config"][key]
    config = read_config(full)
    here = {name: read_config(part.config) for name, part in parts.items()}
    entries: dict[str, TensorEntry] = {}

    def lead(spec: TensorSpec, part: str, like: TensorSpec) -> None:
        entry = parts[part].entry(like.name)
        entries[spec.name] = TensorEntry(
            dtype=entry.dtype, shape=entry.shape, file=f"{part}/{entry.file}",
            offset=entry.offset, length=entry.length,
        )  # fmt: skip

    for layer in range(config.num_hidden_layers):
        if not config.is_moe(layer):
            part, like = "dense", 0
        else:
            part, like = "moe", 0 if config.layer_kinds[layer] is LayerKind.KDA else 1
        theirs = {
            (s.role, s.part, s.expert): s for s in layer_tensors(here[part], like, packed=True)
        }
        for spec in layer_tensors(config, layer, packed=True):
            lead(spec, part, theirs[spec.role, spec.part, spec.expert])
    ours = shard_tensors(config, config.num_hidden_layers + 1)
    theirs_last = {s.role: s for s in shard_tensors(here["moe"], here["moe"].num_hidden_layers + 1)}
    for spec in ours:
        lead(spec, "moe", theirs_last[spec.role])
    return Checkpoint(
        source=LocalFolder(folder), config=full, index=None, headers={}, entries=entries
    )


def files_of(checkpoint: Checkpoint) -> list[Path]:
    root = Path(checkpoint.source.label)
    return sorted({root / entry.file for entry in checkpoint.entries.values()})


def limit(folder: Path) -> dict[str, Any]:
    """Read files into pinned memory and copy them to the GPU, by as many threads as the walk."""
    paths = files_of(replayed(folder))
    target = torch.empty(THREADS * max(PIECES), dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {}
    for name, copies, piece in (
        *((f"files_to_gpu, {piece >> 20} MiB", True, piece) for piece in PIECES),
        ("files_to_host", False, PIECES[0]),
    ):
        for _ in range(3):
            work: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
            fds, total = [], 0
            for path in paths:
                fds.append(os.open(path, os.O_RDONLY))
                for offset in range(0, path.stat().st_size, piece):
                    size = min(piece, path.stat().st_size - offset)
                    total += size
                    work.put((fds[-1], offset, size))
            for _ in range(THREADS):
                work.put(None)
            stream = torch.cuda.Stream()

            def run(
                slot: int,
                work: Any = work,
                stream: Any = stream,
                copies: bool = copies,
                piece: int = piece,
            ) -> None:
                both = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                ready: list[Any] = [None, None]
                turn = 0
                while (job := work.get()) is not None:
                    fd, offset, size = job
                    if ready[turn] is not None:
                        ready[turn].synchronize()
                    os.preadv(fd, [memoryview(both[turn].numpy().data)[:size]], offset)
                    if copies:
                        with torch.cuda.stream(stream):
                            place = target[slot * piece : slot * piece + size]
                            place.copy_(both[turn][:size], non_blocking=True)
                            ready[turn] = stream.record_event()
                    turn = 1 - turn

            threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.cuda.synchronize()
            samples.setdefault(name, []).append(total / (time.perf_counter() - began) / 1e9)
            for fd in fds:
                os.close(fd)
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        samples.setdefault("bus", []).append((1 << 30) / (time.perf_counter() - began) / 1e9)
    left, right = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            left @ right
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / 10
        samples.setdefault("bf16_tflop_s", []).append(2 * 8192**3 / taken / 1e12)
    medians = {k: median(v) for k, v in samples.items()}
    loops = [rate for name, rate in medians.items() if name.startswith("files_to_gpu")]
    return {"kind": "limit", "gb_s": samples, "median": medians, "loop_gb_s": max(loops)}


def dd(path: Path, *flags: str) -> float:
    """Return GB/s of `dd` from a file that is not in the page cache."""
    drop_cache()
    began = time.perf_counter()
    count = COLD_BYTES >> 24
    subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", "bs=16M", f"count={count}", "status=none", *flags],
        check=True,
    )
    return COLD_BYTES / (time.perf_counter() - began) / 1e9


def drop_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def cold(checkpoint: Checkpoint, rounds: int = 3) -> dict[str, Any]:
    """Take two layers from the disk, computing nothing, and read a file with `dd` in between."""
    largest = max(files_of(checkpoint), key=lambda path: path.stat().st_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DeviceModel(
        checkpoint,
        dtype=torch.bfloat16,
        device=device,
        vram_bytes=None if device.type == "cuda" else COLD_ARENA_BYTES,
        threads=THREADS,
    )
    model.embed(torch.zeros(COLD_TOKENS, dtype=torch.int64))  # so many that all experts are read
    every = torch.arange(model.config.moe.num_experts)
    rates: dict[str, list[float]] = {"dd": [], "dd direct": [], "walk": []}

    def time_dd() -> None:
        rates["dd"].append(dd(largest))
        rates["dd direct"].append(dd(largest, "iflag=direct"))

    for _ in range(rounds):
        time_dd()
        drop_cache()
        before, began = model.bytes_read, time.perf_counter()
        with model.walk(first=COLD_LAYERS[0]) as run:
            for layer in COLD_LAYERS:
                run.weights.layer(layer)
                for chunk in run.weights.chunks(layer, every):
                    run.weights.release(chunk)
            amount, seconds = model.bytes_read - before, time.perf_counter() - began
        rates["walk"].append(amount / seconds / 1e9)
        print(json.dumps(rates), flush=True)
    time_dd()
    return {
        "kind": "cold",
        "environment": environment("torch"),
        "device": device.type,
        "bytes": amount,
        "gb_s": rates,
    }


def processor(folder: Path) -> dict[str, Any]:
    """Evaluate a sparse checkpoint in a process of its own."""
    synth(load_config("kimi-k3"), folder / "sparse", sparse=True)
    np.save(folder / "ids.npy", np.arange(5))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROCESSOR, folder / "sparse", folder / "ids.npy"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    summary = json.loads(done.stdout)["summary"]
    return {
        "kind": "processor",
        "environment": environment("torch", "numba"),
        "seconds": seconds,
        "peak_rss_bytes": int(done.stderr.split()[-1]) * 1024,
        **{key: summary[key] for key in ("bytes_read", "checkpoint_bytes", "tokens_scored", "ppl")},
    }


def walk(checkpoint: Checkpoint, run: str) -> dict[str, Any]:
    """Walk once; a run is TOKENS:WINDOW, then perhaps :VRAM:RAM."""
    tokens, ctx, vram, ram = (*run.split(":"), "", "")[:4]
    num_tokens, window = int(tokens), int(ctx)
    torch.cuda.empty_cache()
    model = DeviceModel(
        checkpoint,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        vram_bytes=parse_size(vram) if vram else None,
        ram_bytes=parse_size(ram) if ram else None,
        threads=THREADS,
    )
    config = model.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens + 1)
    windows = list(plan_windows([ids], ctx=window, stride=window, bos=None))
    inputs = [window.inputs for window in windows]
    began = time.perf_counter()
    with closing(walk_layers(model, inputs)) as first_layers:
        for _ in islice(first_layers, WARM_LAYERS + 1):
            pass
    torch.cuda.synchronize()
    warming = time.perf_counter() - began
    before = model.bytes_read
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    edges: list[float] = []
    stream = walk_layers(model, inputs)
    for residual in stream:  # noqa: B007  the last one is what the head reads
        torch.cuda.synchronize()
        edges.append(time.perf_counter() - began)
    layers_done = time.perf_counter() - began
    read = model.bytes_read - before
    rows, targets = scored_rows(windows)
    hidden = finish(model, residual, rows=rows)
    nll = negative_log_likelihood(hidden, targets, model.head_blocks())
    mean = float(nll.mean())
    seconds = time.perf_counter() - began
    work = 2 * count_model(config).active_parameters * num_tokens
    mla = sum(kind is LayerKind.MLA for kind in config.layer_kinds)
    heads = config.mla.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim)
    work += sum(mla * heads * len(w.inputs) ** 2 for w in windows)
    status = Path("/proc/self/status").read_text()
    return {
        "kind": "walk",
        "tokens": num_tokens,
        "ctx": window,
        "vram": vram or None,
        "ram": ram or None,
        "budget": {k: getattr(model.budget, k) for k in model.budget.__dataclass_fields__},
        "layers": config.num_hidden_layers,
        "seconds": seconds,
        "layer_seconds": layers_done,
        "layer_edges": edges,
        "warm_up_seconds": warming,
        "bytes_read": model.bytes_read - before,
        "gb_s": read / layers_done / 1e9,
        "tokens_s": num_tokens / seconds,
        "tflop_s": work / layers_done / 1e12,
        "nll_mean": mean,
        "peak_device_bytes": torch.cuda.max_memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_rss_bytes": int(status.split("VmHWM:")[1].split("kB")[0]) * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "limit", "walk", "cold", "processor", "collect"])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--runs", nargs="+", default=["16384:4096"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS / "eval-h200.json")
    args = parser.parse_args()
    if args.what == "make":
        make(args.paths[0], args.experts)
        return
    if args.what == "limit":
        found = [limit(args.paths[0])]
        print(json.dumps(found[0]), flush=True)
    elif args.what == "cold":
        found = [cold(replayed(args.paths[0]))]
        print(json.dumps(found[0]), flush=True)
    elif args.what == "processor":
        found = [processor(args.paths[0])]
        print(json.dumps(found[0]), flush=True)
    elif args.what == "walk":
        checkpoint = replayed(args.paths[0])
        found = []
        for run in args.runs:
            found.append(walk(checkpoint, run))
            shown = {k: v for k, v in found[-1].items() if k != "layer_edges"}
            print(json.dumps(shown), flush=True)
            args.out.write_text(json.dumps(found) + "\n")
    else:
        runs = [run for path in args.paths for run in json.loads(path.read_text())]
        record = {"environment": gpu_environment("fla-core"), "runs": runs}
        args.results.write_text(json.dumps(record, indent=1) + "\n")
        return
    args.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
