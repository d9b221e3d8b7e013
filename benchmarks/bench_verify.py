"""`verify` against the limits of the machine: sha256 alone, and headers against safe_open.

    python benchmarks/bench_verify.py SHARDS SPARSE

SHARDS: a checkpoint of several GB (`k3quant synth --layers 1-2 --experts 0-127`), read warm.
SPARSE: the full-size one with holes (`k3quant synth --profile kimi-k3 --sparse`).
"""

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import environment, rates, samples, save

RUNS = 5


def hash_alone(folder: Path) -> None:
    """Hash every shard with hashlib, one thread a core, in buffers of 1 MiB."""

    def one(path: Path) -> str:
        digest, buffer = hashlib.sha256(), bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        return digest.hexdigest()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sorted(folder.glob("*.safetensors"))))


def verify_values(folder: Path) -> None:
    from k3quant.checkpoint.folder import LocalFolder
    from k3quant.manifest import load_manifest
    from k3quant.verify.run import Level, VerifySettings, verify

    manifest = load_manifest(folder.parent / f"{folder.name}.manifest.json")
    settings = VerifySettings(level=Level.VALUES, manifest=manifest, jobs=2)
    report = verify(LocalFolder(folder), settings)
    assert report.ok, report.findings


def verify_schema(folder: Path) -> None:
    from k3quant.checkpoint.folder import LocalFolder
    from k3quant.verify.run import Level, VerifySettings, verify

    report = verify(LocalFolder(folder), VerifySettings(level=Level.SCHEMA, jobs=2))
    assert report.ok, report.findings


def list_with_safe_open(folder: Path) -> None:
    from safetensors import safe_open

    def one(path: Path) -> int:
        with safe_open(path, "np") as file:
            found = []
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.append((name, part.get_shape(), part.get_dtype()))
        return len(found)

    total = sum(one(path) for path in sorted(folder.glob("*.safetensors")))
    assert total == 497_220


def peak_bytes(what: str, folder: Path) -> int:
    """Return the peak resident memory of one call in a process of its own."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks')\n"
        "from pathlib import Path\nimport bench_verify\n"
        f"bench_verify.{what}(Path(sys.argv[1]))\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(int(status.split('VmHWM:')[1].split('kB')[0]) * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    shards, sparse = Path(sys.argv[1]), Path(sys.argv[2])
    manifest = shards.parent / f"{shards.name}.manifest.json"
    subprocess.run(
        [sys.executable, "-m", "k3quant.cli", "manifest", "create", shards, "--out", manifest],
        check=True,
        capture_output=True,
    )
    amount = sum(path.stat().st_size for path in shards.glob("*.safetensors"))
    hashing: list[float] = []
    values: list[float] = []
    for _ in range(RUNS):  # interleaved, so that a change of the machine meets both
        hashing += samples(lambda: hash_alone(shards), runs=1)
        values += samples(lambda: verify_values(shards), runs=1)
    listing: list[float] = []
    schema: list[float] = []
    for _ in range(RUNS):
        listing += samples(lambda: list_with_safe_open(sparse), runs=1)
        schema += samples(lambda: verify_schema(sparse), runs=1)
    save(
        "verify",
        {
            "environment": environment("safetensors", "msgspec"),
            "bytes": amount,
            "sha256_alone_2_threads": rates(hashing, amount),
            "verify_values_2_threads": rates(values, amount),
            "values_over_sha256": round(min(hashing) / min(values), 3),
            "safe_open_listing_seconds": [round(s, 3) for s in listing],
            "verify_schema_seconds": [round(s, 3) for s in schema],
            "schema_speedup": round(min(listing) / min(schema), 2),
            "peak_bytes_values": peak_bytes("verify_values", shards),
            "peak_bytes_schema": peak_bytes("verify_schema", sparse),
        },
    )


if __name__ == "__main__":
    main()
