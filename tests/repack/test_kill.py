"""A run is killed (signal 9) between two of its system calls, at random; the same run then ends it.

A child process is forked for each run, so that nothing of a killed one survives in memory.
"""

import hashlib
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.header import scan_header
from k3quant.repack import in_place
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.repack.sidecars import SET_ASIDE_FOLDER

MOMENTS = 20
CALLS = ("pwrite", "fsync", "replace", "rename", "unlink", "link", "posix_fallocate", "mkdir")


def _run_until(moment: int | None, run: Callable[[], object], pipe: int) -> None:
    """Run in this process, and kill it before its call number `moment`; never returns."""
    count = 0

    def counted(real):
        def call(*args, **options):
            nonlocal count
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **options)

        return call

    os.fsync = lambda fd: None  # a killed process loses nothing that the system has
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    in_place.punch_hole = counted(in_place.punch_hole)
    try:
        run()
        os.write(pipe, str(count).encode())
    except BaseException as error:  # the child must not return into the test
        os.write(pipe, repr(error).encode())
    finally:
        os._exit(0)


def _fork(moment: int | None, run: Callable[[], object]) -> str:
    """Run in a child and return its number of calls or its fault, nothing if it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_until(moment, run, writing)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert bool(said) != (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    return said


def _found(path: Path) -> dict[str, str]:
    """Return the digest of every tensor of a file, read as its header says."""
    folder = LocalFolder(path.parent)

    def fetch(offset: int, length: int) -> bytes:
        return folder.read(path.name, offset, length)

    header = scan_header(fetch, file=path.name, file_bytes=path.stat().st_size).header
    assert header is not None
    return {
        name: hashlib.sha256(fetch(header.data_start + e.begin, e.end - e.begin)).hexdigest()
        for name, e in header.tensors.items()
    }


def _check_nothing_lost(folder: Path, expected: dict[str, str]) -> None:
    places = [
        *folder.glob("*.safetensors"),
        *(folder / SET_ASIDE_FOLDER).glob("*.safetensors.moved"),
    ]
    found = [_found(path) for path in places]
    for name, digest in expected.items():
        assert any(tensors.get(name) == digest for tensors in found), f"{name} is lost"


def _check_final_names(out: Path, expected: dict[str, str]) -> None:
    for path in out.glob("*.safetensors"):
        assert _found(path).items() <= expected.items()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_shard_bytes": 60_000}, id="size"),
        pytest.param({"layout": Layout.RANK, "ranks": 3, "max_shard_bytes": 60_000}, id="ranks"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["into a folder", "in place"])
def test_killed_at_any_moment_the_same_command_ends_the_work(
    tiny_source, tmp_path, digests, files, inside, options
):
    expected = {name: digest for name, (_, _, digest) in digests(tiny_source).items()}
    settings = RepackSettings(**options, in_place=inside)
    moments = random.Random(repr((inside, options)))

    def prepare(name: str) -> tuple[Path, Path]:
        source = tmp_path / name / "source"
        shutil.copytree(tiny_source, source)
        return source, source if inside else tmp_path / name / "out"

    source, out = prepare("whole")
    calls = int(_fork(None, lambda: run_repack(source, out, settings)))
    whole = files(out)
    for number in range(MOMENTS // 2):
        source, out = prepare(str(number))
        before = files(source)
        for moment in (moments.randrange(calls), moments.randrange(calls)):
            _fork(moment, lambda source=source, out=out: run_repack(source, out, settings))
            if inside:
                _check_nothing_lost(source, expected)
            else:
                assert files(source) == before
            _check_final_names(out, expected)
        said = _fork(None, lambda source=source, out=out: run_repack(source, out, settings))
        assert said.isdigit(), said
        assert files(out) == whole
        shutil.rmtree(tmp_path / str(number))
