import errno
import hashlib
import os
import random
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from k3quant.checkpoint import output_file
from k3quant.checkpoint.writer import ShardWriter, atomic_write, preflight_space
from k3quant.errors import ExitCode, ResourceError

ENTRIES = [
    ("norm.weight", "BF16", (6,)),
    ("experts.10.w1", "U8", (4, 3)),
    ("experts.9.w1", "U8", (4, 3)),
    ("bias", "F32", (5,)),
    ("nothing", "BF16", (0, 64)),
    ("scalar", "F32", ()),
]
SIZES = {
    "norm.weight": 12,
    "experts.10.w1": 12,
    "experts.9.w1": 12,
    "bias": 20,
    "nothing": 0,
    "scalar": 4,
}


def _tensor_bytes(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def _write_all(path: Path, order: list[str]) -> ShardWriter:
    with ShardWriter(path, ENTRIES) as writer:
        for name in order:
            writer.write(name, _tensor_bytes(name))
    return writer


def _reference(folder: Path) -> bytes:
    _write_all(folder / "reference.safetensors", list(SIZES))
    return (folder / "reference.safetensors").read_bytes()


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_any_order_of_writing_gives_the_bytes_that_safetensors_writes(tmp_path: Path):
    arrays = {
        "bias": np.frombuffer(_tensor_bytes("bias"), "<f4"),
        "codes": np.arange(12, dtype=np.uint8).reshape(4, 3),
    }
    entries = [("codes", "U8", (4, 3)), ("bias", "F32", (5,))]
    with ShardWriter(tmp_path / "a.safetensors", entries) as writer:
        writer.write("codes", arrays["codes"])
        writer.write("bias", arrays["bias"])
    assert (tmp_path / "a.safetensors").read_bytes() == save(arrays)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_and_digest_do_not_depend_on_the_order(tmp_path: Path, seed: int):
    order = list(SIZES)
    random.Random(seed).shuffle(order)
    written = _write_all(tmp_path / "a.safetensors", order).written
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert written.sha256 == hashlib.sha256(raw).hexdigest()
    assert written.size == len(raw)
    assert raw == _reference(tmp_path)


def test_pieces_join_in_any_order(tmp_path: Path):
    data = random.Random(1).randbytes(1000)
    with ShardWriter(tmp_path / "a.safetensors", [("t", "U8", (1000,))]) as writer:
        for begin, end in ((700, 999), (0, 350), (999, 1000), (350, 700), (500, 500)):
            writer.write_at("t", begin, data[begin:end])
    assert load_file(tmp_path / "a.safetensors")["t"].tobytes() == data


def test_a_large_file_is_hashed_while_threads_write_it(tmp_path: Path):
    size, count = 700_001, 12
    data = {f"t{i}": np.random.default_rng(i).bytes(size) for i in range(count)}
    entries = [(name, "U8", (size,)) for name in data]
    with ShardWriter(tmp_path / "a.safetensors", entries) as writer:
        threads = [
            threading.Thread(target=lambda part=part: [writer.write(n, data[n]) for n in part])
            for part in (list(data)[::2], list(data)[1::2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert writer.written.sha256 == hashlib.sha256(raw).hexdigest()
    assert {n: t.tobytes() for n, t in load_file(tmp_path / "a.safetensors").items()} == data


def test_nothing_has_the_final_name_before_the_end(tmp_path: Path):
    with ShardWriter(tmp_path / "a.safetensors", [("t", "U8", (3,))]) as writer:
        assert _names_in(tmp_path) == ["a.safetensors.partial"]
        writer.write("t", b"abc")
        with pytest.raises(ValueError, match="expected a finished file"):
            _ = writer.written
    assert _names_in(tmp_path) == ["a.safetensors"]


def test_a_fault_inside_leaves_no_file(tmp_path: Path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "a.safetensors", ENTRIES):
        raise RuntimeError
    assert _names_in(tmp_path) == []


def test_an_older_partial_file_is_overwritten(tmp_path: Path):
    (tmp_path / "a.safetensors.partial").write_bytes(b"x" * 10_000)
    _write_all(tmp_path / "a.safetensors", list(SIZES))
    assert _names_in(tmp_path) == ["a.safetensors"]
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert set(file.keys()) == SIZES.keys()


def test_the_mode_follows_the_umask(tmp_path: Path):
    old = os.umask(0o027)
    try:
        atomic_write(tmp_path / "index.json", b"{}")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "index.json").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        pytest.param([("bias", b"x" * 20)] * 2, "tensor bias: .*twice", id="twice"),
        pytest.param([("bias", b"x" * 19)], "tensor bias: expected 20 bytes, got 19", id="short"),
        pytest.param([("bias", b"x" * 21)], "tensor bias: expected 20 bytes, got 21", id="long"),
        pytest.param([("other", b"")], "expected one of its tensors, got other", id="unknown"),
        pytest.param([("bias", b"x" * 20)], "tensor scalar: .*gap", id="one missing"),
    ],
)
def test_wrong_writes_are_refused_and_leave_no_file(
    tmp_path: Path, writes: list[tuple[str, bytes]], message: str
):
    def run() -> None:
        with ShardWriter(tmp_path / "a.safetensors", ENTRIES) as writer:
            for name, data in writes:
                writer.write(name, data)

    with pytest.raises(ValueError, match=message):
        run()
    assert _names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("offset", "length", "message"),
    [
        pytest.param(15, 6, "within 20 bytes", id="beyond the end"),
        pytest.param(-1, 2, "within 20 bytes", id="before the beginning"),
        pytest.param(3, 4, "twice", id="over another piece"),
    ],
)
def test_wrong_pieces_are_refused(tmp_path: Path, offset: int, length: int, message: str):
    def run() -> None:
        with ShardWriter(tmp_path / "a.safetensors", ENTRIES) as writer:
            writer.write_at("bias", 0, b"1234")
            writer.write_at("bias", offset, b"x" * length)

    with pytest.raises(ValueError, match=f"tensor bias: .*{message}"):
        run()
    assert _names_in(tmp_path) == []


@pytest.mark.parametrize("align", [8, 64, 4096])
def test_the_data_section_is_aligned(tmp_path: Path, align: int):
    with ShardWriter(tmp_path / "a.safetensors", [("t", "U8", (3,))], align=align) as writer:
        writer.write("t", b"abc")
    assert writer.data_start % align == 0
    assert writer.file_bytes == writer.data_start + 3
    assert load_file(tmp_path / "a.safetensors")["t"].tobytes() == b"abc"


def test_metadata_is_written(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with ShardWriter(path, [("t", "U8", (1,))], metadata={"format": "pt", "作者": "✓"}) as writer:
        writer.write("t", b"a")
    assert path.read_bytes()[8:].startswith('{"__metadata__":{"format":"pt","作者":"✓"}'.encode())


def test_a_shard_without_tensors_is_written(tmp_path: Path):
    with ShardWriter(tmp_path / "a.safetensors", []):
        pass
    assert load_file(tmp_path / "a.safetensors") == {}


def test_a_full_disk_is_named_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(output_file, "free_bytes", lambda folder: 1000)
    with (
        pytest.raises(ResourceError, match=r"no space left: need 5\.\d\d KB, have 1\.00 KB, short"),
        ShardWriter(tmp_path / "a.safetensors", [("t", "U8", (5000,))]),
    ):
        pass
    assert _names_in(tmp_path) == []


def test_a_file_system_without_preallocation_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    written = _write_all(tmp_path / "a.safetensors", list(SIZES)).written
    assert written.sha256 == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()


def test_a_file_beyond_the_size_limit_is_a_resource_error(tmp_path: Path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ResourceError, match="file too large") as caught:
            atomic_write(tmp_path / "big", b"x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code is ExitCode.IO
    assert _names_in(tmp_path) == []


def test_atomic_write_replaces_the_file(tmp_path: Path):
    atomic_write(tmp_path / "index.json", b"old")
    written = atomic_write(tmp_path / "index.json", b"new one")
    assert (tmp_path / "index.json").read_bytes() == b"new one"
    assert (written.file, written.size) == ("index.json", 7)
    assert written.sha256 == hashlib.sha256(b"new one").hexdigest()


def test_preflight_says_need_have_and_short(tmp_path: Path):
    folder = tmp_path / "not" / "there"
    preflight_space(folder, 1_000_000, free=lambda _: 1_000_000)
    with pytest.raises(ResourceError) as caught:
        preflight_space(folder, 1_000_000, free=lambda _: 999_999, hint="delete something")
    assert caught.value.message == f"{folder}: need 1.00 MB, have 1000.00 KB, short 1 B"
    assert caught.value.hint == "delete something"


def test_preflight_asks_the_file_system_of_a_folder_to_come(tmp_path: Path):
    preflight_space(tmp_path / "not" / "there", 1)
    with pytest.raises(ResourceError):
        preflight_space(tmp_path / "not" / "there", 1 << 62)
