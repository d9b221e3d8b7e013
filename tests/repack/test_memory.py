import subprocess
import sys

import pytest

from k3quant.checkpoint.header import encode_header

SCRIPT = """
import sys
from pathlib import Path
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings
source, out, in_place = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
def peak():  # of this program alone; getrusage counts what forked it
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
run_repack(source, out, RepackSettings(max_shard_bytes=150_000_000, in_place=in_place))
print((peak() - before) * 1024)
"""
MIB = 1 << 20


@pytest.mark.parametrize("in_place", [False, True], ids=["into a folder", "in place"])
@pytest.mark.parametrize("count", [10, 60], ids=["50 MB", "300 MB"])
def test_memory_does_not_grow_with_the_model(tmp_path, count, in_place):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    entries = [(f"tensor.{number}", "U8", (5_000_000,)) for number in range(count)]
    header, _ = encode_header(entries)
    with (source / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 5_000_000 * count)
    out = source if in_place else tmp_path / "out"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, out, str(in_place)],
        capture_output=True,
        text=True,
        check=True,
    )
    # One copy buffer, two to compare, the interpreter's own growth: no whole file, no whole tensor.
    assert int(run.stdout) < 48 * MIB
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) > 5_000_000 * count
