"""How fast `download` is on the loopback, against what the machine can do at all.

Every round measures, one after the other and on the same files:

  sha256         hashing memory, one thread a processor
  get            plain GETs of the files over as many connections, bytes thrown away
  get_one        one plain GET, bytes thrown away
  get_to_file    the same over all connections, written to files, not hashed
  get_hash_file  the same, hashed too: a bare loop that does a download's work, without its care
  snapshot       huggingface_hub's snapshot_download into a folder, which does not hash
  download       `run_download`: hashed, written, synced

The server is a process of its own on the same processors, and sha256, get and get_to_file each take
all of them. So a download cannot be as fast as the slower of two: where processors are short, the
time of both is what it needs at least. That is `sha256 then get_to_file`. Results go to
benchmarks/results/download.json. Run: `python benchmarks/bench_download.py`.
"""

import argparse
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from record import environment, save

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import INDEX_FILE, encode_index

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "hub" / "server.py"
REPO = "test/repo"
CHUNK = 1 << 18

DOWNLOAD = """
from k3quant.hub.download import run_download
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
settings = DownloadSettings(jobs=int(sys.argv[2]))
began = time.perf_counter()
report = run_download(parse_reference("test/repo"), Path(sys.argv[1]), settings)
assert report.summary["state"] == "complete", report
"""
SNAPSHOT = """
from huggingface_hub import snapshot_download
began = time.perf_counter()
snapshot_download("test/repo", local_dir=sys.argv[1], max_workers=int(sys.argv[2]))
"""
BEFORE = """
import json, resource, sys, time
from pathlib import Path
import huggingface_hub.utils
"""
AFTER = """
seconds = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss would count the program that forked this one
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps({"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_rss_bytes": peak * 1024}))
"""


def make_repository(folder: Path, *, num_files: int, file_bytes: int) -> list[str]:
    folder.mkdir(parents=True)
    block = os.urandom(1 << 20)
    weight_map: dict[str, str] = {}
    for n in range(1, num_files + 1):
        name = f"model-{n:05d}-of-{num_files:06d}.safetensors"
        header, _ = encode_header([(f"t{n}", "U8", (file_bytes,))])
        with (folder / name).open("wb") as file:
            file.write(header)
            for _ in range(file_bytes >> 20):
                file.write(block)
        weight_map[f"t{n}"] = name
    (folder / "config.json").write_text("{}")
    (folder / INDEX_FILE).write_bytes(encode_index(weight_map, num_files * file_bytes))
    return sorted(weight_map.values())


def fetch(url: str, path: Path | None, *, hashed: bool = False) -> int:
    """One plain GET, thrown away or written, hashed or not."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.request("GET", parts.path)
    response = connection.getresponse()
    count, digest = 0, hashlib.sha256()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if path else None
    while chunk := response.read1(CHUNK):
        if fd is not None:
            os.pwrite(fd, chunk, count)
        if hashed:
            digest.update(chunk)
        count += len(chunk)
    if fd is not None:
        os.close(fd)
    connection.close()
    return count


def hash_memory(count: int) -> int:
    digest, block = hashlib.sha256(), bytes(1 << 20)
    for _ in range(count >> 20):
        digest.update(block)
    return count


def rate(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - began)


def run_child(script: str, out: Path, jobs: int, url: str) -> dict[str, float]:
    shutil.rmtree(out, ignore_errors=True)
    variables = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script + AFTER, str(out), str(jobs)],
        env=variables, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_round(
    url: str, names: list[str], total: int, out: Path, *, jobs: int, processors: int
) -> dict[str, float]:
    urls = [f"{url}/{REPO}/resolve/main/{name}" for name in names]
    share = total // processors >> 20 << 20
    with ThreadPoolExecutor(max(jobs, processors)) as pool:
        sha256 = rate(lambda: sum(pool.map(hash_memory, [share] * processors)))
        get = rate(lambda: sum(pool.map(lambda u: fetch(u, None), urls)))
        get_one = rate(lambda: fetch(urls[0], None))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        paths = [out / name for name in names]
        get_to_file = rate(lambda: sum(pool.map(fetch, urls, paths)))
        shutil.rmtree(out)
        out.mkdir()
        get_hash_file = rate(lambda: sum(pool.map(partial(fetch, hashed=True), urls, paths)))
        shutil.rmtree(out)
    snapshot = run_child(SNAPSHOT, out, jobs, url)
    download = run_child(DOWNLOAD, out, jobs, url)
    return {
        "sha256": sha256,
        "get": get,
        "get_one": get_one,
        "get_to_file": get_to_file,
        "get_hash_file": get_hash_file,
        "snapshot": total / snapshot["seconds"],
        "snapshot_cpu_seconds": snapshot["cpu_seconds"],
        "snapshot_peak_rss_bytes": snapshot["peak_rss_bytes"],
        "download": total / download["seconds"],
        "download_cpu_seconds": download["cpu_seconds"],
        "download_peak_rss_bytes": download["peak_rss_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; default is memory (/dev/shm)")
    parser.add_argument("--name", default="download", help="name of the result")
    arguments = parser.parse_args()
    where = environment("huggingface_hub")
    base = arguments.folder or Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="k3quant-bench-", dir=base))
    try:
        names = make_repository(
            work / "repo", num_files=arguments.files, file_bytes=arguments.file_mib << 20
        )
        total = sum((work / "repo" / name).stat().st_size for name in names)
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(work / "repo")], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        processors = len(os.sched_getaffinity(0))
        jobs = arguments.jobs
        try:
            samples = [
                one_round(url, names, total, work / "out", jobs=jobs, processors=processors)
                for _ in range(arguments.rounds)
            ]
        finally:
            server.terminate()
            server.wait()
    finally:
        shutil.rmtree(work)
    for s in samples:
        s["sha256_then_get_to_file"] = 1 / (1 / s["sha256"] + 1 / s["get_to_file"])
    pairs = {
        "download / min(sha256, get_one)": ("sha256", "get_one"),
        "download / min(sha256, get)": ("sha256", "get"),
        "download / min(sha256, get_to_file)": ("sha256", "get_to_file"),
        "download / sha256 then get_to_file": ("sha256_then_get_to_file",),
        "download / get_hash_file": ("get_hash_file",),
        "download / snapshot": ("snapshot",),
    }
    ratios = {
        name: [round(s["download"] / min(s[key] for key in keys), 3) for s in samples]
        for name, keys in pairs.items()
    }
    save(
        arguments.name,
        where
        | {
            "setup": {
                "files": arguments.files,
                "bytes": total,
                "jobs": jobs,
                "folder": "memory" if arguments.folder is None else "disk",
                "server": "tests/hub/server.py in its own process on the same processors, sendfile",
                "units": "bytes per second unless named",
            },
            "median": {key: round(median(s[key] for s in samples), 3) for key in samples[0]},
            "best": {key: round(max(s[key] for s in samples), 3) for key in samples[0]},
            "ratios": {
                name: {"median": median(values), "best": max(values), "rounds": values}
                for name, values in ratios.items()
            },
            "samples": samples,
        },
    )


if __name__ == "__main__":
    main()
