"""What a download does when nothing special is wrong with the folder or the server."""

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest
from typer.testing import CliRunner

from k3quant.checkpoint.index import INDEX_FILE
from k3quant.cli.main import app
from k3quant.errors import HashError, IncompleteError, RefusedError, ResourceError, UsageError
from k3quant.hub.folder_lock import FolderLock
from k3quant.hub.partial import partial_path, state_path
from k3quant.hub.record import LOCK_FILE, RECORD_FILE
from k3quant.hub.settings import DownloadSettings
from k3quant.manifest import FileRecord, Manifest
from k3quant.report import Report

Run = Callable[..., Report]
LayOut = Callable[..., None]
Toy = Callable[[int], dict[str, bytes]]

SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]
STRAYS = {"copy/model-00001-of-000003.safetensors", "consolidated.00.pth"}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD_FILE
    }


def record(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / RECORD_FILE).read_text())
    return document


def without_strays(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in STRAYS}


@pytest.mark.parametrize("redirect", [None, "same", "other"])
@pytest.mark.parametrize("jobs", [1, 4])
def test_fetches_the_index_s_shards_and_what_is_no_weight(
    hub: Any, download: Run, out: Path, files: dict[str, bytes], redirect: str | None, jobs: int
) -> None:
    hub.redirect = redirect
    report = download(jobs=jobs)
    assert report.ok
    assert contents(out) == without_strays(files)
    assert report.summary["state"] == "complete"
    assert report.summary["fetched_bytes"] == sum(map(len, without_strays(files).values()))


def test_record_names_commit_and_digests(
    hub: Any, hub_server: Any, download: Run, out: Path, files: dict[str, bytes]
) -> None:
    download()
    document = record(out)
    assert document["commit"] == hub.repos["test/repo"].head
    assert document["state"] == "complete"
    assert {name: entry["sha256"] for name, entry in document["fetched"].items()} == {
        name: hub_server.sha256_of(data) for name, data in without_strays(files).items()
    }
    proofs = {entry["proof"] for entry in document["fetched"].values()}
    assert proofs == {"sha256", "git"}


def test_strays_are_named_and_left(download: Run) -> None:
    report = download()
    (note,) = report.findings
    assert note.code == "strays-left"
    assert "2 files (10.00 KB) not in index" in note.message


def test_second_run_reads_everything_and_fetches_nothing(hub: Any, download: Run) -> None:
    download()
    hub.seen.clear()
    report = download()
    assert report.ok
    assert hub.sent() == 0
    assert (report.summary["fetched_files"], report.summary["kept_files"]) == (0, 10)


def test_index_is_written_last(hub: Any, download: Run, out: Path) -> None:
    hub.fault(SHARDS[2], times=1000, status=503)
    with pytest.raises(ResourceError):
        download()
    assert (out / SHARDS[0]).exists()
    assert not (out / INDEX_FILE).exists()
    assert record(out)["state"] == "partial"


def test_file_of_another_size_is_replaced_and_named(
    hub: Any, download: Run, lay_out: LayOut, out: Path, files: dict[str, bytes]
) -> None:
    lay_out("config.json")
    (out / "config.json").write_bytes(b"edited by hand")
    wanted = len(files["config.json"])
    report = download(verify_only=True)
    assert report.exit_code == 3
    assert f"config.json: expected {wanted} bytes, got 14" in [f.message for f in report.findings]
    report = download()
    (warning,) = (f for f in report.findings if f.code == "replaced")
    assert warning.message == f"config.json: expected {wanted} bytes, got 14 (replaced)"
    assert (out / "config.json").read_bytes() == files["config.json"]


def test_files_that_are_there_are_not_fetched(hub: Any, download: Run, lay_out: LayOut) -> None:
    lay_out(*SHARDS[:2], INDEX_FILE)
    report = download()
    assert report.summary["kept_files"] == 3
    assert hub.sent(SHARDS[0]) == hub.sent(SHARDS[1]) == hub.sent(INDEX_FILE) == 0


def test_branch_that_moved_since_is_refused(hub: Any, repo: Any, download: Run, out: Path) -> None:
    hub.fault(SHARDS[2], times=1000, status=503)
    with pytest.raises(ResourceError):
        download()
    hub.faults.clear()
    old = repo.head
    repo.commit({**repo.commits[old], "README.md": b"changed"})
    with pytest.raises(RefusedError) as caught:
        download()
    assert old in caught.value.message
    assert repo.head in caught.value.message
    assert f"test/repo@{old}" in caught.value.hint
    assert download(old).summary["state"] == "complete"


def test_new_commit_that_is_accepted_keeps_what_did_not_change(
    hub: Any, repo: Any, download: Run, out: Path
) -> None:
    download()
    repo.commit({**repo.commits[repo.head], "README.md": b"changed"})
    hub.seen.clear()
    report = download(accept_new_commit=True)
    assert report.summary["state"] == "complete"
    assert hub.sent() == len(b"changed")
    assert (out / "README.md").read_bytes() == b"changed"
    assert record(out)["commit"] == repo.head


def test_branch_that_moves_during_the_download_changes_nothing(
    hub: Any, repo: Any, download: Run, out: Path, files: dict[str, bytes]
) -> None:
    hub.bytes_per_second = 1e6
    mover = Thread(target=lambda: (sleep(0.15), repo.commit({"config.json": b"another"})))
    mover.start()
    report = download()
    mover.join()
    assert report.summary["state"] == "complete"
    assert contents(out) == without_strays(files)


def test_folder_of_another_repository_is_refused(
    hub: Any, hub_server: Any, download: Run, out: Path
) -> None:
    download()
    text = (out / RECORD_FILE).read_text().replace("test/repo", "other/repo")
    (out / RECORD_FILE).write_text(text)
    with pytest.raises(
        RefusedError, match="expected a folder for test/repo, got one of other/repo"
    ):
        download()


def test_two_downloads_into_one_folder_are_refused(hub: Any, download: Run, out: Path) -> None:
    with FolderLock(out), pytest.raises(RefusedError, match="got one at work"):
        download()
    assert download().ok
    assert not (out / LOCK_FILE).exists()


def test_groups_and_patterns(hub: Any, download: Run, out: Path) -> None:
    report = download(include=("tokenizer", "config"))
    assert set(contents(out)) == {"tiktoken.model", "tokenizer_config.json", "config.json"}
    assert report.summary["state"] == "subset"
    assert record(out)["state"] == "subset"
    assert hub.sent(INDEX_FILE) == 0


def test_pattern_never_takes_strays(hub: Any, download: Run, out: Path) -> None:
    download(include=("*00001-of*",))
    assert set(contents(out)) == {SHARDS[0]}


def test_records_in_the_repository_are_left_there(
    hub: Any, repo: Any, download: Run, out: Path, files: dict[str, bytes]
) -> None:
    theirs = {RECORD_FILE: b"{}", "x.partial": b"x", "x.partial.json": b"{}", LOCK_FILE: b""}
    repo.commit({**files, **theirs})
    report = download()
    assert report.summary["state"] == "complete"
    assert contents(out) == without_strays(files)
    assert record(out)["repository"] == "test/repo"


def test_stray_that_is_named_in_full_is_fetched(hub: Any, download: Run, out: Path) -> None:
    download(include=("consolidated.00.pth",))
    assert set(contents(out)) == {"consolidated.00.pth"}


def test_pattern_that_matches_nothing(hub: Any, download: Run, out: Path) -> None:
    with pytest.raises(UsageError, match=r"expected files that match `\*\.gguf`, got 0 of 12"):
        download(include=("*.gguf",))
    assert not out.exists()


def test_headers_alone(hub: Any, download: Run, out: Path, files: dict[str, bytes]) -> None:
    report = download(include=("headers",))
    assert contents(out) == {f"{name}.header": files[name][:72] for name in SHARDS}
    assert report.summary["state"] == "subset"


def test_subset_grows_into_the_whole(hub: Any, download: Run, out: Path) -> None:
    download(include=("sidecars", SHARDS[0]))
    assert record(out)["state"] == "subset"
    hub.seen.clear()
    assert download().summary["state"] == "complete"
    assert hub.sent(SHARDS[0]) == 0


def test_whole_stays_whole_when_a_part_is_asked_for_again(download: Run, out: Path) -> None:
    download()
    assert download(include=("tokenizer",)).summary["state"] == "complete"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        pytest.param({"sha256": "0" * 64}, "expected sha256 000", id="digest"),
        pytest.param({"bytes": 5}, "expected bytes 5", id="size"),
    ],
)
def test_manifest_that_disagrees_with_the_listing_is_refused_before_the_first_byte(
    hub: Any, download: Run, out: Path, known: dict[str, Any], words: str
) -> None:
    manifest = Manifest(name="m", files={SHARDS[1]: FileRecord(**known)})
    with pytest.raises(HashError, match=words):
        download(manifest=manifest)
    assert hub.sent("safetensors") == 0
    assert not out.exists()


def test_manifest_s_digest_is_checked_where_the_hub_has_none(
    hub: Any, download: Run, out: Path
) -> None:
    manifest = Manifest(name="m", files={"README.md": FileRecord(sha256="0" * 64)})
    report = download(manifest=manifest)
    assert report.exit_code == 5
    assert "README.md: expected 0000" in report.findings[0].message
    assert not (out / "README.md").exists()


def test_endpoint_without_digests_is_said(
    hub: Any, repo: Any, download: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"type": "file", "path": name, "size": len(data)}
        for name, data in repo.commits[repo.head].items()
    ]
    hub.fault("/tree/", times=100, status=200, body=json.dumps(rows).encode())
    report = download()
    assert report.ok
    (warning,) = (f for f in report.findings if f.code == "unproven")
    assert "only sizes for 10 files" in warning.message


def test_rate_limit_is_kept(hub: Any, download: Run, files: dict[str, bytes]) -> None:
    total = sum(map(len, without_strays(files).values()))
    began = monotonic()
    download(rate_limit=900_000)
    assert monotonic() - began > 0.8 * total / 900_000


def test_connections_help_with_the_last_file(
    hub: Any, repo: Any, download: Run, out: Path, toy: Toy
) -> None:
    files = toy(2_000_000)
    repo.commit({"config.json": b"{}", "model.safetensors": files[SHARDS[0]]})
    hub.bytes_per_second = 700e3
    began = monotonic()
    report = download(jobs=8)
    assert report.summary["state"] == "complete"
    assert (out / "model.safetensors").read_bytes() == files[SHARDS[0]]
    assert monotonic() - began < 1.8  # one connection needs 2.9 s
    assert len({seen.connection for seen in hub.files_asked()}) >= 4
    assert hub.sent() < 1.6 * len(files[SHARDS[0]])


def test_progress_adds_up(hub: Any, download: Run) -> None:
    class Bar:
        def __init__(self) -> None:
            self.stages: list[list[int]] = []

        def start(self, label: str, total: int, unit: str) -> None:
            self.stages.append([total, 0])

        def advance(self, amount: int) -> None:
            self.stages[-1][1] += amount

        def note(self, text: str) -> None: ...

    bar = Bar()
    hub.fault(SHARDS[1], flip_at=5000)
    hub.fault(SHARDS[2], cut_at=100_000)
    download(progress=bar)
    assert len(bar.stages) == 2
    assert all(total == done for total, done in bar.stages)


class TestInterrupted:
    """A download that was stopped goes on with what it has."""

    def test_lost_network_leaves_a_state_to_resume(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARDS[1], times=1000, cut_at=200_000, after=0)
        hub.fault(SHARDS[1], times=1000, status=503)
        hub.faults[0].times = 1
        with pytest.raises(ResourceError) as caught:
            download()
        assert f"k3quant download test/repo --out {out}" in caught.value.hint
        assert partial_path(out / SHARDS[1]).exists()
        assert state_path(out / SHARDS[1]).exists()
        hub.faults.clear()
        hub.seen.clear()
        report = download(jobs=1)
        assert report.summary["state"] == "complete"
        assert report.summary["resumed_bytes"] >= 3 * (64 << 10)
        assert hub.sent(SHARDS[1]) <= len(files[SHARDS[1]]) - 3 * (64 << 10)
        assert contents(out) == without_strays(files)

    def test_finished_files_are_trusted_while_a_download_is_under_way(
        self, hub: Any, download: Run, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.fault(SHARDS[2], times=1000, status=503)
        with pytest.raises(ResourceError):
            download(jobs=1)
        hub.faults.clear()
        hashed: list[str] = []
        from k3quant.hub import existing

        original = existing.hash_file
        monkeypatch.setattr(
            existing,
            "hash_file",
            lambda path, *a, **k: hashed.append(path.name) or original(path, *a, **k),
        )
        assert download().ok
        assert hashed == []
        assert download().ok
        assert len(hashed) == 10

    def test_changed_file_is_not_trusted(self, hub: Any, download: Run, out: Path) -> None:
        hub.fault(SHARDS[2], times=1000, status=503)
        with pytest.raises(ResourceError):
            download(jobs=1)
        hub.faults.clear()
        data = bytearray((out / SHARDS[0]).read_bytes())
        data[5000] ^= 1
        (out / SHARDS[0]).write_bytes(data)
        report = download()
        assert report.ok
        assert [f.subject for f in report.findings if f.code == "replaced"] == [SHARDS[0]]

    def test_begun_file_of_other_bytes_is_begun_anew(
        self, hub: Any, repo: Any, download: Run, out: Path, toy: Toy
    ) -> None:
        hub.fault(SHARDS[1], cut_at=200_000)
        hub.fault(SHARDS[1], times=1000, status=503)
        with pytest.raises(ResourceError):
            download()
        hub.faults.clear()
        changed = toy(310_000)
        repo.commit(changed)
        report = download(accept_new_commit=True)
        assert report.summary["resumed_bytes"] == 0
        assert (out / SHARDS[1]).read_bytes() == changed[SHARDS[1]]

    def test_bad_resumed_part_is_found_and_fetched_anew(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARDS[1], cut_at=200_000)
        hub.fault(SHARDS[1], times=1000, status=503)
        with pytest.raises(ResourceError):
            download()
        hub.faults.clear()
        path = partial_path(out / SHARDS[1])
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
        assert download().summary["state"] == "complete"
        assert (out / SHARDS[1]).read_bytes() == files[SHARDS[1]]

    def test_cut_partial_file_is_not_trusted_beyond_its_end(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARDS[1], cut_at=200_000)
        hub.fault(SHARDS[1], times=1000, status=503)
        with pytest.raises(ResourceError):
            download()
        hub.faults.clear()
        path = partial_path(out / SHARDS[1])
        path.write_bytes(path.read_bytes()[:70_000])
        report = download()
        assert report.summary["resumed_bytes"] == 64 << 10
        assert (out / SHARDS[1]).read_bytes() == files[SHARDS[1]]

    @pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"done": 3}'])
    def test_damaged_state_means_a_new_start(
        self, hub: Any, download: Run, out: Path, text: bytes
    ) -> None:
        out.mkdir()
        partial_path(out / SHARDS[1]).write_bytes(b"leftover" * 100_000)
        state_path(out / SHARDS[1]).write_bytes(text)
        report = download()
        assert report.summary["state"] == "complete"
        assert report.summary["resumed_bytes"] == 0
        assert not list(out.glob("*.partial*"))

    def test_leftovers_of_finished_and_gone_files_are_removed(
        self, hub: Any, download: Run, out: Path
    ) -> None:
        download()
        for name in (SHARDS[0], "gone.safetensors"):
            partial_path(out / name).write_bytes(b"x" * 1000)
            state_path(out / name).write_bytes(b"{}")
        (out / "notes.partial").write_bytes(b"not ours")
        report = download()
        assert report.summary["removed_partials"] == 2
        assert [p.name for p in out.glob("*.partial*")] == ["notes.partial"]

    def test_ctrl_c_keeps_what_arrived_and_says_how_to_go_on(
        self, hub: Any, download: Run, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from k3quant.hub import crew

        hub.bytes_per_second = 200e3
        arrived = Event()
        original = crew.Thread.join

        def join(thread: Thread, timeout: float | None = None) -> None:
            if thread.name == "download-0":
                arrived.wait(5)
                if not hub.faults:
                    hub.fault("nothing")
                    raise KeyboardInterrupt
            original(thread, timeout)

        monkeypatch.setattr(crew.Thread, "join", join)
        Thread(target=lambda: (sleep(0.7), arrived.set())).start()
        began = monotonic()
        with pytest.raises(IncompleteError) as caught:
            download()
        assert monotonic() - began < 2
        assert "got a request to stop" in caught.value.message
        assert f"k3quant download test/repo --out {out}" in caught.value.hint
        hub.bytes_per_second = None
        report = download()
        assert report.summary["state"] == "complete"
        assert report.summary["resumed_bytes"] > 0


@pytest.mark.parametrize(("words", "seconds"), [([], 30.0), (["--stall-timeout", "7"], 7.0)])
def test_command_and_library_agree_on_what_a_stall_is(
    monkeypatch: pytest.MonkeyPatch, out: Path, words: list[str], seconds: float
) -> None:
    seen: list[DownloadSettings] = []

    def run(reference: Any, folder: Path, settings: DownloadSettings, progress: Any) -> Report:
        seen.append(settings)
        return Report(command="download")

    monkeypatch.setattr("k3quant.hub.download.run_download", run)
    result = CliRunner().invoke(app, ["download", "test/repo", "--out", str(out), *words])
    assert result.exit_code == 0, result.output
    assert seen[0].stall_timeout == seconds
    if not words:
        assert seen[0].stall_timeout == DownloadSettings().stall_timeout
