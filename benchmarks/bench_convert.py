"""`convert` against the disk's write rate and against peers, on one layer of released widths.

    python benchmarks/bench_convert.py SOURCE WORK [PEERS]

SOURCE: a folder with a shard set of a few GB; where there is none, what `bench_repack` measures is
written there, with the bundled vocabulary, which GGUF needs. WORK: a folder on the disk to measure.
PEERS: the Python of an environment with llm-compressor and compressed-tensors.
Each round writes and syncs the same number of bytes as the conversion did, right after it; the
written pages are handed to the disk at once, as `convert` does, because otherwise a plain writer
shows the kernel's patience with dirty pages and not the disk. `start_up` is a conversion of the
bundled nano checkpoint: seconds that every measurement here contains. Both digests, of the source
and of the output, cost `sha256_alone` a processor and a byte; `nvfp4, source not hashed` leaves one
out.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_repack import make_source
from record import environment, rates, samples, save

from k3quant.checkpoint.page_cache import start_writeback

ROUNDS = 3
NANO = Path(__file__).resolve().parents[1] / "k3quant" / "nano"
HASHED_BYTES = 1 << 29
TARGETS = {
    "nvfp4": ("nvfp4",),
    "nvfp4, source not hashed": ("nvfp4", "--no-source-hash"),
    "bf16": ("bf16",),
    "gguf": ("gguf",),
    "mxfp8": ("mxfp8",),
    "fp8-block": ("fp8-block",),
    "int8": ("int8",),
    "int4": ("int4",),
}
OURS = """
import json, sys, time
from pathlib import Path
began = time.perf_counter()
from k3quant.cli.main import app
try:
    app(["convert", sys.argv[1], "--out", sys.argv[2], "--json", "--to", *sys.argv[3:]])
except SystemExit as end:
    assert not end.code, end.code
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split("kB")[0]) * 1024
print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": peak}), file=sys.stderr)
"""
PEER_BF16 = """
import sys
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint
convert_checkpoint(sys.argv[1], sys.argv[2], CompressedTensorsDequantizer(sys.argv[1]))
"""
PEER_NVFP4 = """
import sys
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from llmcompressor import model_free_ptq
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme="NVFP4A16",
               ignore=["re:^(?!.*experts).*"], max_workers=2, device="cpu",
               converter=CompressedTensorsDequantizer(sys.argv[1]))
"""


def tensor_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def written_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir() if p.suffix in {".safetensors", ".gguf"})


def write_alone(path: Path, amount: int) -> float:
    """Write and sync as many bytes, from memory, in blocks of 16 MiB into reserved space."""
    block = os.urandom(1 << 20) * 16
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(fd, 0, amount)
    for offset in range(0, amount, len(block)):
        os.pwrite(fd, block[: amount - offset], offset)
        start_writeback(fd, offset, len(block))
    os.fsync(fd)
    os.close(fd)
    taken = time.perf_counter() - start
    path.unlink()
    return taken


def convert_once(source: Path, out: Path, target: tuple[str, ...]) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", OURS, source, out, *target],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return found


def ours(source: Path, work: Path, target: tuple[str, ...]) -> dict[str, Any]:
    seconds: list[float] = []
    disk: list[float] = []
    peak = size = 0
    for _ in range(ROUNDS):
        out = work / "ours"
        found = convert_once(source, out, target)
        seconds.append(found["seconds"])
        peak = max(peak, found["peak_bytes"])
        size = written_bytes(out)
        shutil.rmtree(out)
        disk.append(write_alone(work / "blob", size))
    amount = tensor_bytes(source)
    return {
        "input": rates(seconds, amount),
        "output": rates(seconds, size),
        "disk_write_alone": rates(disk, size),
        "output_over_disk": round(min(disk) / min(seconds), 3),
        "output_bytes": size,
        "peak_bytes": peak,
    }


def peer(python: str, code: str, source: Path, work: Path) -> dict[str, Any]:
    out = work / "peer"
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    done = subprocess.run(
        ["/usr/bin/time", "-f", "%M", python, "-c", code, source, out],
        capture_output=True, text=True, check=False, timeout=540,
    )  # fmt: skip
    taken = time.perf_counter() - start
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        return {"failed": done.stderr[-600:]}
    peak = int(done.stderr.split()[-1]) * 1024
    return {"input": rates([taken], tensor_bytes(source)), "peak_bytes": peak}


def main() -> None:
    source, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        make_source(source)
        for name in ("tiktoken.model", "tokenizer_config.json"):
            shutil.copy(NANO / name, source)
    result: dict[str, Any] = {
        "environment": environment("torch", "numba"),
        "input_bytes": tensor_bytes(source),
    }
    data = os.urandom(HASHED_BYTES)
    hashed = samples(lambda: hashlib.sha256(data).digest(), runs=ROUNDS)
    result["sha256_alone"] = rates(hashed, HASHED_BYTES)
    small = [convert_once(NANO, work / "ours", ("nvfp4",))["seconds"] for _ in range(ROUNDS)]
    result["start_up"] = {"seconds": small}
    for name, target in TARGETS.items():
        result[name] = ours(source, work, target)
        print(name, json.dumps(result[name]), file=sys.stderr)
    if len(sys.argv) > 3:
        result["peers"] = {
            "compressed-tensors -> bf16": peer(sys.argv[3], PEER_BF16, source, work),
            "llm-compressor -> nvfp4": peer(sys.argv[3], PEER_NVFP4, source, work),
        }
    save("convert", result)


if __name__ == "__main__":
    main()
