"""SIGKILL at twenty moments, and SIGINT: the next run goes on, and the end is right."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from k3quant.errors import ExitCode
from k3quant.hub.folder_check import check_offline
from k3quant.hub.settings import DownloadSettings
from k3quant.report import Report

Run = Callable[..., Report]
Toy = Callable[[int], dict[str, bytes]]

JOBS = 4
PIECE = 32 << 10

# Imports once, then forks a download for each line it reads: it tells the child's id at once and
# its end afterwards.
NURSERY = """
import os, signal, sys
from pathlib import Path
import huggingface_hub.utils
from k3quant.errors import K3QuantError
from k3quant.hub.download import run_download
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
settings = DownloadSettings(jobs=4, piece_bytes=32 << 10, retry_wait=0.01)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = 0
        try:
            run_download(parse_reference("test/repo"), Path(sys.argv[1]), settings)
        except K3QuantError as error:
            Path(sys.argv[2]).write_text(error.message + error.hint)
            code = error.exit_code
        os._exit(code)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Nursery:
    """Starts downloads in processes of their own, without the time an interpreter takes."""

    def __init__(self, out: Path, said: Path) -> None:
        command = [sys.executable, "-c", NURSERY, str(out), str(said)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin
        assert self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout

    def start(self) -> int:
        self._in.write("go\n")
        self._in.flush()
        return int(self._out.readline())

    def end(self, pid: int, how: signal.Signals) -> int:
        """Send a signal and return the exit code; negative for the signal that ended it."""
        with suppress(ProcessLookupError):
            os.kill(pid, how)
        return int(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait(5)
        self._out.close()


@pytest.fixture
def nursery(hub: Any, out: Path, tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(out, tmp_path / "said")
    yield nursery
    nursery.close()


@pytest.fixture
def slow_files(hub: Any, repo: Any, toy: Toy) -> dict[str, bytes]:
    files = toy(2_000_000)
    repo.commit(files)
    hub.bytes_per_second = 400e3
    return files


def wait_for_bytes(hub: Any) -> None:
    asked = len(hub.files_asked())
    until = time.monotonic() + 10
    while len(hub.files_asked()) == asked and time.monotonic() < until:
        time.sleep(0.005)


def test_twenty_kills_send_at_most_one_piece_again_for_each_connection(
    hub: Any, nursery: Nursery, download: Run, out: Path, slow_files: dict[str, bytes]
) -> None:
    moments = random.Random(5)
    for _ in range(20):
        pid = nursery.start()
        wait_for_bytes(hub)
        time.sleep(moments.uniform(0.0, 0.4))
        assert nursery.end(pid, signal.SIGKILL) == -signal.SIGKILL
        finished = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
        assert finished.items() <= slow_files.items()
    hub.bytes_per_second = None
    report = download(jobs=JOBS, piece_bytes=PIECE)
    assert report.summary["state"] == "complete"
    shards = {name: data for name, data in slow_files.items() if name.startswith("model-0")}
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == shards
    assert not list(out.glob("*.partial*"))
    # What a dead connection held in its buffers was sent but never read.
    buffers = 64 << 10
    sent = hub.sent("safetensors")
    assert sent <= sum(map(len, shards.values())) + 21 * JOBS * (PIECE + buffers)


def test_sigint_ends_with_the_line_to_go_on(
    hub: Any, nursery: Nursery, out: Path, tmp_path: Path, slow_files: dict[str, bytes]
) -> None:
    pid = nursery.start()
    wait_for_bytes(hub)
    time.sleep(0.4)
    began = time.monotonic()
    assert nursery.end(pid, signal.SIGINT) == ExitCode.INCOMPLETE
    assert time.monotonic() - began < 3
    assert f"k3quant download test/repo --out {out}" in (tmp_path / "said").read_text()
    assert list(out.glob("*.partial"))


def test_killed_download_is_no_checkpoint(
    hub: Any, nursery: Nursery, out: Path, slow_files: dict[str, bytes]
) -> None:
    pid = nursery.start()
    wait_for_bytes(hub)
    time.sleep(0.3)
    nursery.end(pid, signal.SIGKILL)
    report = check_offline(out, DownloadSettings())
    assert report.exit_code is ExitCode.INCOMPLETE
    assert report.summary["state"] == "partial"
    assert "3 of 3 shards missing" in report.findings[0].message
