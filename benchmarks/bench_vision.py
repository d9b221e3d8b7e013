"""Seconds, peak memory and tokens a second of the full vision tower over large pictures.

    python benchmarks/bench_vision.py --device cpu --runs 1
    python benchmarks/bench_vision.py --device cuda --runs 5

The tower and projector have the released shapes and random weights, and are read from a file block
by block. Each case runs in a process of its own, whose VmHWM is the peak. `resident` holds the
weights on the device before the clock starts: the rest of the difference is reading. Results of a
device replace only its own cases in `results/vision.json`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import RESULTS, environment, save

from k3quant.checkpoint.writer import ShardWriter
from k3quant.manifest import load_config
from k3quant.models.k3_config import K3Config, read_config
from k3quant.models.k3_tensors import num_shards, shard_tensors

ROOT = Path(__file__).resolve().parents[1]
TABLE = 1 << 20  # random values that all tensors are made of


def write_tower(config: K3Config, folder: Path) -> int:
    """Write projector and tower as one file of random bfloat16 and return its bytes."""
    last = num_shards(config)
    specs = shard_tensors(config, last - 1) + shard_tensors(config, last)
    table = np.random.default_rng(0).standard_normal(TABLE).astype(np.float32)
    path = folder / "model.safetensors"
    with ShardWriter(path, [(s.name, s.dtype, s.shape) for s in specs], digest=False) as writer:
        for number, spec in enumerate(specs):
            size = int(np.prod(spec.shape))
            values = np.resize(np.roll(table, 7919 * number), size)
            if len(spec.shape) == 1:
                values = 1 + 0.1 * values
            elif spec.role != "vision.pos_emb":
                values = values * np.prod(spec.shape[1:]) ** -0.5
            bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            writer.write(spec.name, bits.reshape(spec.shape))
    return path.stat().st_size


class Noise:
    """A picture of normalised noise."""

    def __init__(self, side: int) -> None:
        from k3quant.models.vision_grid import Grid

        self.grid = Grid(1, side, side)
        shape = (self.grid.num_patches, 3, 14, 14)
        self._values = np.random.default_rng(1).random(shape, dtype=np.float32) * 2 - 1

    def pixels(self) -> np.ndarray:
        return self._values


class Resident:
    """Weights that were read beforehand, walked like those that are not."""

    def __init__(self, weights: Any) -> None:
        self.vision, self.device, self.dtype = weights.vision, weights.device, weights.dtype
        self.find_non_finite = weights.find_non_finite
        self._units = list(weights.walk())

    def walk(self) -> Any:
        yield from self._units


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process."""
    import torch

    from k3quant.checkpoint.reader import open_checkpoint
    from k3quant.eval.media_features import media_features
    from k3quant.eval.media_weights import VisionWeights

    if case["threads"]:
        torch.set_num_threads(case["threads"])
    checkpoint = open_checkpoint(Path(case["folder"]))
    config = read_config(checkpoint.config)
    device = torch.device(case["device"])
    weights: Any = VisionWeights(
        checkpoint, config, dtype=getattr(torch, case["dtype"]), device=device
    )
    if case["resident"]:
        weights = Resident(weights)
    pictures = [Noise(case["pixels"] // 14) for _ in range(case["pictures"])]
    start = _peak_bytes()

    def run() -> int:
        tokens = sum(len(features) for features in media_features(weights, pictures))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return tokens

    if device.type == "cuda":
        run()  # loads kernels
    taken = []
    for _ in range(case["runs"]):
        began = time.perf_counter()
        tokens = run()
        taken.append(time.perf_counter() - began)
    found = {
        "tokens": tokens,
        "patches": sum(picture.grid.num_patches for picture in pictures),
        "seconds": [round(s, 4) for s in taken],
        "tokens_s": round(tokens / median(taken), 1),
        "threads": torch.get_num_threads(),
        "start_rss_bytes": start,
        "peak_rss_bytes": _peak_bytes(),
    }
    if device.type == "cuda":
        found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def cases(device: str, pixels: int, runs: int, threads: int) -> list[dict[str, Any]]:
    """Return the cases of a device."""
    shared = {"device": device, "runs": runs, "threads": threads}
    if device == "cpu":
        return [
            shared | {"dtype": "float32", "pixels": side, "pictures": 1, "resident": False}
            for side in (448, pixels)
        ]
    return [
        shared | {"dtype": dtype, "pixels": pixels, "pictures": count, "resident": resident}
        for dtype, count, resident in (
            ("bfloat16", 1, False), ("bfloat16", 1, True), ("bfloat16", 8, False),
            ("bfloat16", 8, True), ("float32", 1, False),
        )
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pixels", type=int, default=1792)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--commit", help="of a tree without git")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    document = load_config("kimi-k3")
    place = RESULTS / "vision.json"
    before = json.loads(place.read_text())["devices"] if place.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(document))
        tower_bytes = write_tower(read_config(document), folder)
        rows = []
        for case in cases(options.device, options.pixels, options.runs, options.threads):
            words = [sys.executable, __file__, "--child", json.dumps(case | {"folder": name})]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            rows.append(case | json.loads(done.stdout))
            print(rows[-1], file=sys.stderr, flush=True)
    found = environment("torch") | {"tower_bytes": tower_bytes, "cases": rows}
    found["commit"] = options.commit or found["commit"]
    save("vision", {"devices": before | {options.device: found}})


if __name__ == "__main__":
    main()
