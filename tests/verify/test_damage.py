"""Any damage to a healthy checkpoint is found, and nothing crashes on the way."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.header import encode_header, parse_json
from k3quant.errors import ResourceError
from k3quant.manifest import Manifest
from k3quant.manifest_create import create_manifest
from k3quant.report import Report, Severity
from k3quant.verify.run import Level, VerifySettings, verify

INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)]
MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(scope="module")
def healthy(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    copy = Path(shutil.copytree(cases / "base", tmp_path_factory.mktemp("healthy") / "base"))
    (copy / "SHA256SUMS").unlink()
    return create_manifest(LocalFolder(copy), name="base")


@pytest.fixture
def folder(cases: Path, tmp_path: Path) -> Path:
    """Return a copy without digests beside it: only the level under test can find faults."""
    copy = Path(shutil.copytree(cases / "base", tmp_path / "x", dirs_exist_ok=True))
    (copy / "SHA256SUMS").unlink(missing_ok=True)
    return copy


def restore(cases: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(cases / "base", folder)
    (folder / "SHA256SUMS").unlink()


def check(folder: Path, level: Level, manifest: Manifest | None = None) -> Report:
    report = verify(LocalFolder(folder), VerifySettings(level=level, manifest=manifest, jobs=1))
    json.dumps(report.to_json())
    return report


def split(raw: bytes) -> Tensors:
    length = int.from_bytes(raw[:8], "little")
    tensors, _ = parse_json(raw[8 : 8 + length])
    start = 8 + length
    return {
        name: (e.dtype, e.shape, raw[start + e.begin : start + e.end])
        for name, e in tensors.items()
    }


def join(tensors: Tensors) -> bytes:
    header, placed = encode_header((n, d, s) for n, (d, s, _) in tensors.items())
    order = sorted(placed, key=lambda name: (placed[name].begin, placed[name].end))
    return header + b"".join(tensors[name][2] for name in order)


def damage_bytes(raw: bytes, draw: Draw) -> bytes:
    """Change the bytes of a file in one way; the result always differs."""
    kind = draw(st.sampled_from(["flip", "cut", "grow", "zero", "swap"]))
    place = draw(st.integers(0, len(raw) - 1))
    if kind == "flip":
        return raw[:place] + bytes([raw[place] ^ draw(st.integers(1, 255))]) + raw[place + 1 :]
    if kind == "cut":
        return raw[:place]
    if kind == "grow":
        return raw + bytes(draw(st.integers(1, 64)))
    if kind == "zero":
        end = min(place + draw(st.integers(1, 512)), len(raw))
        return raw[:place] + bytes(end - place) + raw[end:]
    other = draw(st.integers(0, len(raw) - 1))
    low, high = sorted((place, other))
    return raw[:low] + raw[high:] + raw[low:high]


@given(data=st.data())
@MANY
def test_hash_finds_every_changed_byte(
    cases: Path, folder: Path, healthy: Manifest, data: st.DataObject
) -> None:
    restore(cases, folder)
    file = data.draw(st.sampled_from([*FILES, INDEX, "config.json"]))
    before = (folder / file).read_bytes()
    after = damage_bytes(before, data.draw)
    (folder / file).write_bytes(after)
    report = check(folder, Level.HASH, healthy)
    assert report.ok == (after == before)


STRUCTURAL = [
    "rename", "retype", "reshape", "drop", "duplicate", "move", "unindex", "misindex", "cut",
    "grow", "lose", "hole", "overlap",
]  # fmt: skip


def damage_structure(folder: Path, draw: Draw) -> str:
    """Break names, dtypes, shapes, places or the index in one way, and say which."""
    kind = draw(st.sampled_from(STRUCTURAL))
    file = draw(st.sampled_from(FILES))
    path = folder / file
    raw = path.read_bytes()
    tensors = split(raw)
    name = draw(st.sampled_from(sorted(tensors)))
    dtype, shape, content = tensors[name]
    if kind == "rename":
        tensors[name + draw(st.sampled_from(["x", ".weight", "_scale"]))] = tensors.pop(name)
    elif kind == "retype":
        other = {"U8": "I8", "BF16": "I16", "F32": "I32"}[dtype]
        tensors[name] = (other, shape, content)
    elif kind == "reshape":
        flat = len(content) // {"U8": 1, "BF16": 2, "F32": 4}[dtype]
        tensors[name] = (dtype, (1, flat, 1), content)
    elif kind == "drop":
        del tensors[name]
    elif kind == "duplicate":
        home = draw(st.sampled_from([f for f in FILES if f != file]))
        others = split((folder / home).read_bytes())
        others[name] = tensors[name]
        (folder / home).write_bytes(join(others))
    elif kind == "move":
        home = draw(st.sampled_from([f for f in FILES if f != file]))
        others = split((folder / home).read_bytes())
        others[name] = tensors.pop(name)
        (folder / home).write_bytes(join(others))
    elif kind in {"unindex", "misindex"}:
        index = json.loads((folder / INDEX).read_text())
        if kind == "unindex":
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = draw(st.sampled_from([f for f in FILES if f != file]))
        (folder / INDEX).write_text(json.dumps(index))
        return kind
    elif kind == "cut":
        path.write_bytes(raw[: draw(st.integers(0, len(raw) - 1))])
        return kind
    elif kind == "grow":
        path.write_bytes(raw + bytes(draw(st.integers(1, 99))))
        return kind
    elif kind == "lose":
        path.unlink()
        return kind
    elif kind in {"hole", "overlap"}:
        path.write_bytes(shift_last(raw, 8 if kind == "hole" else -8))
        return kind
    path.write_bytes(join(tensors))
    return kind


def shift_last(raw: bytes, by: int) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    header[last]["data_offsets"] = [o + by for o in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    payload = raw[8 + length :]
    payload = payload + bytes(by) if by > 0 else payload[:by]
    return len(text).to_bytes(8, "little") + text + payload


@given(data=st.data())
@settings(MANY, max_examples=150)
def test_schema_finds_every_structural_change_without_digests(
    cases: Path, folder: Path, data: st.DataObject
) -> None:
    restore(cases, folder)
    kind = damage_structure(folder, data.draw)
    report = check(folder, Level.SCHEMA)
    assert not report.ok, kind


@given(data=st.data())
@MANY
def test_any_damage_ends_in_a_report(cases: Path, folder: Path, data: st.DataObject) -> None:
    restore(cases, folder)
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from([*FILES, INDEX, "config.json"]))
        if raw := (folder / file).read_bytes():
            (folder / file).write_bytes(damage_bytes(raw, data.draw))
    for finding in check(folder, Level.VALUES).findings:
        assert finding.message
        assert finding.subject


class Failing(LocalFolder):
    """A folder one of whose shards fails while it is read."""

    def __init__(self, root: Path, file: str, after: int) -> None:
        super().__init__(root)
        self._bad, self._after = file, after

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        if file == self._bad and offset + len(buffer) > self._after:
            text = os.strerror(errno.EIO).lower()
            raise ResourceError(f"{file}: expected to read at offset {offset}, got {text}")
        super().read_into(file, offset, buffer)


def test_failing_disk_is_a_finding_for_that_shard_and_the_others_are_still_read(
    cases: Path,
) -> None:
    source = Failing(cases / "V19", FILES[1], 4096)
    report = verify(source, VerifySettings())
    codes = {(f.code, f.subject) for f in report.findings if f.severity is Severity.ERROR}
    assert ("read", FILES[1]) in codes
    assert any(code == "not-finite" for code, _ in codes)  # shard 3 was read to its end


class Shrinking(LocalFolder):
    """A folder one of whose shards is cut between its header and its data."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        with (self.root / FILES[1]).open("r+b") as shard:
            shard.truncate(9000)
        super().read_into(file, offset, buffer)


def test_file_cut_between_header_and_data_is_a_finding(base: Path) -> None:
    report = verify(Shrinking(base), VerifySettings(jobs=1))
    assert report.exit_code == 3
    assert [f.subject for f in report.findings if f.code == "short-read"] == [FILES[1]]
