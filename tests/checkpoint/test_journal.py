import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from k3quant.checkpoint.journal import (
    JOURNAL_FILE,
    FileStamp,
    Job,
    open_journal,
    read_journal,
    stamp_source,
)
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.checkpoint.writer import ShardWriter, WrittenFile, atomic_write
from k3quant.errors import ExitCode, RefusedError, StructureError

STAMP = FileStamp(size=10, mtime_ns=5, header_sha256="ab" * 32)
JOB = Job(command="repack", parameters={"max": 20, "layers": (0, 3)}, source={"a": STAMP})


def _record(folder: Path, file: str, data: bytes = b"data") -> WrittenFile:
    with open_journal(folder, JOB) as journal:
        written = atomic_write(folder / file, data)
        journal.record(written, details={"proof": [1, 2]})
    return written


def test_a_finished_output_is_known_to_the_next_run(tmp_path: Path):
    out = tmp_path / "new" / "out"
    with open_journal(out, JOB) as journal:
        assert not journal.finished
        written = atomic_write(out / "x", b"data")
        journal.record(written, details={"proof": [1, 2]})
    with open_journal(out, JOB) as journal:
        assert journal.finished["x"].written == written
        assert journal.finished["x"].details == {"proof": [1, 2]}
        assert not journal.complete
        journal.mark_complete()
    with open_journal(out, JOB) as journal:
        assert journal.complete
    state = read_journal(out)
    assert state is not None
    assert state.job == replace(JOB, parameters={"max": 20, "layers": [0, 3]})
    assert state.finished["x"].written == written
    assert state.complete


@pytest.mark.parametrize("change", ["gone", "short"])
def test_an_output_that_changed_counts_as_unfinished(tmp_path: Path, change: str):
    _record(tmp_path / "out", "x")
    with open_journal(tmp_path / "out", JOB) as journal:
        journal.mark_complete()
    path = tmp_path / "out" / "x"
    path.unlink() if change == "gone" else path.write_bytes(b"dat")
    with open_journal(tmp_path / "out", JOB) as journal:
        assert not journal.finished
        assert not journal.complete


def test_the_last_record_of_a_file_counts(tmp_path: Path):
    _record(tmp_path, "x", b"data")
    written = _record(tmp_path, "x", b"other data")
    with open_journal(tmp_path, JOB) as journal:
        assert journal.finished["x"].written == written


def test_a_line_that_a_crash_cut_is_dropped(tmp_path: Path):
    _record(tmp_path, "x")
    path = tmp_path / JOURNAL_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"file":"y","siz')
    with open_journal(tmp_path, JOB) as journal:
        assert set(journal.finished) == {"x"}
    assert path.read_bytes() == whole


@pytest.mark.parametrize("left", [0, 1, 40])
def test_a_journal_cut_in_its_first_line_is_a_new_one(tmp_path: Path, left: int):
    with open_journal(tmp_path, JOB):
        pass
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:left])
    assert read_journal(tmp_path) is None
    with open_journal(tmp_path, JOB) as journal:
        assert not journal.finished


@pytest.mark.parametrize("lines", [b"no json\n", b'{"command":"repack"}\n', b"[]\n"])
def test_a_damaged_journal_is_refused(tmp_path: Path, lines: bytes):
    (tmp_path / JOURNAL_FILE).write_bytes(lines)
    with pytest.raises(StructureError, match="expected lines of JSON that begin with a job"):
        open_journal(tmp_path, JOB)


@pytest.mark.parametrize("journal", [None, b"", b'{"comma'])
def test_a_folder_with_files_and_no_whole_journal_is_refused(tmp_path: Path, journal: bytes | None):
    (tmp_path / "precious.txt").write_text("mine")
    if journal is not None:
        (tmp_path / JOURNAL_FILE).write_bytes(journal)
    with pytest.raises(RefusedError, match=r"empty output folder, got 1 entries \(precious") as got:
        open_journal(tmp_path, JOB)
    assert got.value.exit_code is ExitCode.REFUSED
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert (tmp_path / JOURNAL_FILE).exists() == (journal is not None)


def test_work_in_place_starts_among_files(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with open_journal(tmp_path, JOB, may_hold_files=True) as journal:
        assert not journal.finished


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(
            replace(JOB, parameters={"max": 40, "layers": (0, 3)}),
            r'started with, {"max": 20, "layers": \[0, 3\]}, got {"max": 40, "layers": \[0, 3\]}',
            id="parameters",
        ),
        pytest.param(replace(JOB, command="convert"), "`repack` of .* got `convert`", id="command"),
        pytest.param(replace(JOB, version="9.9"), "got `repack` of k3quant 9.9", id="version"),
        pytest.param(
            replace(JOB, source={"a": replace(STAMP, size=11)}),
            "a was 10 bytes, .* is 11 bytes",
            id="source",
        ),
        pytest.param(
            replace(JOB, source={"a": replace(STAMP, mtime_ns=6)}), "changed at 6 ns", id="mtime"
        ),
        pytest.param(
            replace(JOB, source={"a": STAMP, "b": STAMP}), "b was absent", id="one file more"
        ),
    ],
)
def test_another_job_is_refused(tmp_path: Path, other: Job, message: str):
    _record(tmp_path, "x")
    with pytest.raises(RefusedError, match=message) as caught:
        open_journal(tmp_path, other)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_two_jobs_at_once_are_refused(tmp_path: Path):
    with open_journal(tmp_path, JOB), pytest.raises(RefusedError, match="got one at work"):
        open_journal(tmp_path, JOB)
    with open_journal(tmp_path, JOB):
        pass


def test_every_line_is_on_the_disk_before_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    with open_journal(tmp_path, JOB) as journal:
        journal.record(WrittenFile(file="x", size=1, sha256="00"))
        assert synced[-1] == (tmp_path / JOURNAL_FILE).stat().st_size


def test_the_stamp_of_a_source_names_size_time_and_header(tmp_path: Path):
    with ShardWriter(tmp_path / "model.safetensors", [("t", "U8", (3,))]) as writer:
        writer.write("t", b"abc")
    (tmp_path / "config.json").write_bytes(b"{}")
    raw = (tmp_path / "model.safetensors").read_bytes()
    stamps = stamp_source(open_checkpoint(tmp_path))
    assert stamps["model.safetensors"] == FileStamp(
        size=len(raw),
        mtime_ns=(tmp_path / "model.safetensors").stat().st_mtime_ns,
        header_sha256=hashlib.sha256(raw[:-3]).hexdigest(),
    )
    assert stamps["config.json"].header_sha256 == hashlib.sha256(b"{}").hexdigest()
