"""Public reports of downloads gone wrong, each with its right outcome; the names are the cases'."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from k3quant.checkpoint.index import INDEX_FILE
from k3quant.errors import ExitCode, IncompleteError, K3QuantError, ResourceError
from k3quant.hub.folder_check import check_offline
from k3quant.hub.path_lengths import too_long_paths
from k3quant.hub.settings import DownloadSettings
from k3quant.report import Report

Run = Callable[..., Report]
LayOut = Callable[..., None]
Toy = Callable[[int], dict[str, bytes]]

SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]
SHARD = SHARDS[1]
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 16255643104\n"
)
PAGE = b"<!DOCTYPE html><html><body>429 Too Many Requests</body></html>"


def messages(report: Report) -> str:
    return "\n".join(finding.message for finding in report.findings)


class TestD01WrongContent:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            pytest.param(POINTER, "Git LFS pointer (real size 16255643104", id="lfs-pointer"),
            pytest.param(PAGE, "not safetensors", id="error-page"),
        ],
    )
    def test_offline_names_what_it_is(
        self, lay_out: LayOut, out: Path, content: bytes, words: str
    ) -> None:
        lay_out("config.json", INDEX_FILE, *SHARDS)
        (out / SHARD).write_bytes(content)
        report = check_offline(out, DownloadSettings())
        assert report.exit_code in {ExitCode.INCOMPLETE, ExitCode.STRUCTURE}
        assert f"{SHARD}: " in messages(report)
        assert words in messages(report)
        assert "header too large" not in messages(report)

    def test_online_fetches_the_file_again(
        self, hub: Any, download: Run, lay_out: LayOut, out: Path, files: dict[str, bytes]
    ) -> None:
        lay_out(*SHARDS)
        (out / SHARD).write_bytes(POINTER)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]
        assert hub.sent(SHARDS[0]) == 0

    def test_error_page_in_place_of_a_shard_is_no_shard(
        self, hub: Any, download: Run, out: Path
    ) -> None:
        hub.fault(SHARD, times=1000, status=200, body=PAGE)
        with pytest.raises(ResourceError, match=f"a file of {len(PAGE)} bytes instead of 300074"):
            download()
        assert not (out / SHARD).exists()


class TestD02SameSizeDifferentBytes:
    def test_flipped_bit_on_disk(
        self, hub: Any, hub_server: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        download()
        data = bytearray(files[SHARD])
        data[-100] ^= 1
        (out / SHARD).write_bytes(data)
        hub.seen.clear()
        report = download(verify_only=True)
        assert report.exit_code is ExitCode.HASH
        right, wrong = hub_server.sha256_of(files[SHARD]), hub_server.sha256_of(bytes(data))
        assert messages(report) == f"{SHARD}: expected {right}, got {wrong}"
        assert hub.sent("safetensors") == 0
        report = download()
        assert report.ok
        assert report.summary["fetched_files"] == 1
        assert {seen.path.rpartition("/")[2] for seen in hub.files_asked()} == {SHARD}
        assert (out / SHARD).read_bytes() == files[SHARD]

    def test_flipped_bit_in_transit_is_fetched_again(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARD, flip_at=200_000)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]

    def test_server_that_always_flips_a_bit(
        self, hub: Any, hub_server: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARD, times=1000, flip_at=200_000)
        report = download()
        assert report.exit_code is ExitCode.HASH
        assert f"{SHARD}: expected {hub_server.sha256_of(files[SHARD])}, got " in messages(report)
        assert report.summary["state"] == "partial"
        assert not (out / SHARD).exists()
        assert not (out / INDEX_FILE).exists()
        assert (out / SHARDS[0]).read_bytes() == files[SHARDS[0]]
        assert not list(out.glob("*.partial*"))

    def test_server_that_always_flips_a_bit_of_the_index(
        self, hub: Any, download: Run, out: Path
    ) -> None:
        hub.fault(INDEX_FILE, times=1000, flip_at=50)
        with pytest.raises(K3QuantError, match="2 times") as caught:
            download()
        assert caught.value.exit_code is ExitCode.HASH


class TestD04InterruptedSnapshot:
    @pytest.fixture
    def snapshot(self, lay_out: LayOut, out: Path) -> None:
        lay_out("config.json", INDEX_FILE, SHARDS[0], SHARDS[2])
        cache = out / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / f"{SHARD}.abc.incomplete").write_bytes(b"x" * 4096)

    @pytest.mark.usefixtures("snapshot")
    def test_offline(self, out: Path) -> None:
        report = check_offline(out, DownloadSettings())
        assert report.exit_code is ExitCode.INCOMPLETE
        assert "1 of 3 shards missing, 1 partial (4096 bytes)" in messages(report)
        assert report.summary["state"] == "partial"

    @pytest.mark.usefixtures("snapshot")
    def test_online_fetches_only_that_file(self, hub: Any, download: Run) -> None:
        report = download(jobs=1)
        assert report.ok
        assert [hub.sent(name) for name in (SHARDS[0], SHARDS[2], INDEX_FILE)] == [0, 0, 0]
        assert hub.sent(SHARD) == 300_074
        assert "1 unfinished files (4.10 KB) of another download client" in messages(report)


class TestD05PartialFetchTakenAsWhole:
    def test_index_and_one_shard(self, lay_out: LayOut, out: Path) -> None:
        lay_out("config.json", INDEX_FILE, SHARDS[0])
        report = check_offline(out, DownloadSettings())
        assert report.exit_code is ExitCode.INCOMPLETE
        missing = [f.subject for f in report.findings if f.code == "missing-file"]
        assert missing == SHARDS[1:]

    def test_deliberate_subset_is_never_complete(
        self, download: Run, out: Path, settings: DownloadSettings
    ) -> None:
        assert download(include=("tokenizer",)).summary["state"] == "subset"
        with pytest.raises(IncompleteError, match=r"got a subset \(tokenizer of test/repo\)"):
            check_offline(out, settings)
        report = check_offline(out, replace(settings, include=("tokenizer",)))
        assert report.ok
        assert report.summary["state"] == "subset"

    def test_subset_with_shards(self, download: Run, out: Path, settings: DownloadSettings) -> None:
        download(include=("sidecars", SHARDS[0]))
        report = check_offline(out, settings)
        assert report.exit_code is ExitCode.INCOMPLETE
        assert "2 of 3 shards missing" in messages(report)


class TestD06TroubleDuringTheListing:
    @pytest.mark.parametrize("status", [503, 429, 500, 502, 504])
    def test_is_never_a_success(
        self, hub: Any, download: Run, lay_out: LayOut, files: dict[str, bytes], status: int
    ) -> None:
        lay_out(*(name for name in files if "/" not in name))  # what a cached folder looks like
        hub.fault("/tree/", times=1000, status=status)
        with pytest.raises(ResourceError) as caught:
            download(attempts=3)
        assert f"HTTP {status}" in caught.value.message
        assert hub.url in caught.value.message

    def test_waits_as_told(self, hub: Any, download: Run) -> None:
        hub.fault("/tree/", status=503)
        hub.fault("/tree/", status=429, headers={"Retry-After": "1"})
        began = monotonic()
        assert download().ok
        assert monotonic() - began >= 1

    def test_waits_as_told_during_the_files(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, status=429, headers={"Retry-After": "1"})
        began = monotonic()
        assert download().ok
        assert monotonic() - began >= 1


class TestD07StallNearTheEnd:
    @pytest.mark.parametrize("redirect", [None, "other"])
    def test_reconnects_by_range(
        self, hub: Any, repo: Any, download: Run, out: Path, toy: Toy, redirect: str | None
    ) -> None:
        files = toy(3_000_000)
        repo.commit(files)
        hub.redirect = redirect
        size = len(files[SHARD])
        where = f"/cdn/.*{SHARD}" if redirect else SHARD
        hub.fault(where, stall_at=size * 99 // 100)
        began = monotonic()
        assert download(jobs=2, piece_bytes=1 << 20, stall_timeout=0.5).ok
        assert monotonic() - began < 5
        assert (out / SHARD).read_bytes() == files[SHARD]
        assert hub.sent(SHARD) + hub.sent(f"{SHARD}?Signature=secret") < 1.02 * size

    def test_server_that_always_stalls_fails(self, hub: Any, download: Run, out: Path) -> None:
        hub.fault(SHARD, times=1000, stall_at=1000)
        began = monotonic()
        with pytest.raises(ResourceError, match="got silence, 3 times in a row"):
            download(stall_timeout=0.3, attempts=3)
        assert monotonic() - began < 6
        assert not (out / SHARD).exists()

    def test_trickle_is_a_stall(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, times=1000, bytes_per_second=1000.0)
        with pytest.raises(ResourceError, match=r"got \d+ bytes in 0 s, 3 times in a row"):
            download(stall_timeout=0.3, attempts=3)


class TestD08DiskPreflight:
    @pytest.fixture
    def missing(self, hub: Any, lay_out: LayOut, files: dict[str, bytes]) -> int:
        kept = [name for name in files if name != SHARDS[2]]
        lay_out(*kept)
        return len(files[SHARDS[2]])

    def test_only_missing_bytes_count(self, download: Run, missing: int) -> None:
        assert download(free=lambda folder: missing).ok

    def test_short_by_one_byte(self, hub: Any, download: Run, missing: int) -> None:
        with pytest.raises(ResourceError) as caught:
            download(free=lambda folder: missing - 1)
        assert "need 300.07 KB, have 300.07 KB, short 1 B" in caught.value.message
        assert hub.sent("safetensors") == 0

    def test_what_arrived_of_a_partial_file_does_not_count(
        self, hub: Any, download: Run, missing: int
    ) -> None:
        hub.fault(SHARDS[2], cut_at=200_000)
        hub.fault(SHARDS[2], times=1000, status=503)
        with pytest.raises(ResourceError):
            download(jobs=1)
        hub.faults.clear()
        assert download(free=lambda folder: missing - 3 * (64 << 10)).ok


class TestD09DiskFull:
    def test_full_disk_leaves_no_short_file_and_is_resumed(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        from k3quant.hub import transfer

        original = transfer.write_all

        def full(fd: int, offset: int, view: memoryview) -> None:
            if offset > 150_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(fd, offset, view)

        monkeypatch.setattr(transfer, "write_all", full)
        with pytest.raises(ResourceError, match="no space left") as caught:
            download()
        assert "go on with" in caught.value.hint
        assert not any((out / name).exists() for name in SHARDS)
        monkeypatch.undo()
        os.environ["HF_ENDPOINT"] = hub.url
        try:
            report = download()
        finally:
            del os.environ["HF_ENDPOINT"]
        assert report.summary["state"] == "complete"
        assert report.summary["resumed_bytes"] > 0

    def test_file_size_limit_of_the_process(self, hub: Any, out: Path) -> None:
        script = (
            "import sys; from pathlib import Path\n"
            "from k3quant.errors import K3QuantError\n"
            "from k3quant.hub.download import run_download\n"
            "from k3quant.hub.reference import parse_reference\n"
            "from k3quant.hub.settings import DownloadSettings\n"
            "try: run_download(parse_reference('test/repo'), Path(sys.argv[1]), "
            "DownloadSettings(piece_bytes=65536))\n"
            "except K3QuantError as error: print(error.message); sys.exit(error.exit_code)\n"
        )

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = subprocess.run(
            [sys.executable, "-c", script, str(out)],
            preexec_fn=limit, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == ExitCode.IO, done.stderr
        assert "got file too large" in done.stdout
        assert not any((out / name).exists() for name in SHARDS)


class TestD10GlobPullsDuplicates:
    def test_strays_are_not_fetched(self, hub: Any, download: Run, out: Path) -> None:
        download()
        assert hub.sent("copy/model-00001-of-000003.safetensors") == 0
        assert not (out / "copy").exists()
        assert not (out / "consolidated.00.pth").exists()


class TestD11IndexAbsent:
    def test_offline(self, lay_out: LayOut, out: Path) -> None:
        lay_out("config.json", *SHARDS)
        with pytest.raises(IncompleteError, match="index missing") as caught:
            check_offline(out, DownloadSettings())
        assert "repack --rebuild-index" in caught.value.hint

    def test_online(self, hub: Any, repo: Any, download: Run, files: dict[str, bytes]) -> None:
        repo.commit({n: d for n, d in files.items() if n != INDEX_FILE})
        with pytest.raises(IncompleteError, match=r"index missing: expected .* beside 3 shards"):
            download()
        assert hub.sent() == 0


class TestD13WindowsPathLengths:
    ROOT = "C:\\" + "d" * 151  # 154 characters
    CACHE_NAME = ".cache/huggingface/download/" + "n" * 28 + "." + "e" * 40 + ".incomplete"

    def test_another_client_s_cache_would_not_fit(self) -> None:
        assert len(f"{self.ROOT}\\{self.CACHE_NAME}") > 259

    def test_a_shard_fits(self) -> None:
        assert not list(too_long_paths(self.ROOT, ["model-00001-of-000096.safetensors"]))

    @pytest.mark.parametrize(("root_length", "fits"), [(208, True), (209, False), (247, False)])
    def test_longest_name_decides(self, root_length: int, fits: bool) -> None:
        # root + \ + 33 characters of name + .partial.json.new
        root = "C:\\" + "d" * (root_length - 3)
        faults = list(too_long_paths(root, ["model-00001-of-000096.safetensors"]))
        assert (not faults) == fits
        assert all("at most 259 characters" in fault for fault in faults)

    def test_folder_between_248_and_255(self) -> None:
        root = "C:\\" + "d" * 240
        (fault,) = too_long_paths(root, ["asset/a"])
        assert "got" in fault

    def test_folder_limit_comes_before_the_path_limit(self) -> None:
        root = "C:\\" + "d" * 233  # 236; folder 248, file within 259 without our suffix
        (fault,) = too_long_paths(root, ["abcdefghijk/x"])
        assert "characters, got" in fault

    def test_long_spelling_has_no_limit(self) -> None:
        assert not list(too_long_paths("\\\\?\\C:\\" + "d" * 300, ["model.safetensors"]))


class TestD14NothingToDo:
    def test_listing_without_the_index_s_shards(
        self, hub: Any, repo: Any, download: Run, files: dict[str, bytes]
    ) -> None:
        repo.commit({n: d for n, d in files.items() if not n.endswith(".safetensors")})
        with pytest.raises(IncompleteError, match="expected 3 shards, got 0 of 3"):
            download()

    def test_listing_of_nothing(self, hub: Any, repo: Any, download: Run) -> None:
        repo.commit({})
        with pytest.raises(IncompleteError, match="got 0 shards among 0 files"):
            download()

    def test_listing_of_some_shards(
        self, hub: Any, repo: Any, download: Run, files: dict[str, bytes]
    ) -> None:
        repo.commit({n: d for n, d in files.items() if n != SHARD})
        with pytest.raises(IncompleteError, match=f"got 2 of 3; first missing is {SHARD}"):
            download()


class TestD16FoldersAreNoFiles:
    def test_folder_in_the_listing_is_not_counted(
        self, hub: Any, download: Run, out: Path, settings: DownloadSettings
    ) -> None:
        report = download()
        assert report.ok
        assert report.summary["files"] == 10
        assert check_offline(out, settings).ok
        assert download(verify_only=True).ok


class TestOtherMisbehaviour:
    def test_file_that_vanished(self, hub: Any, download: Run, out: Path) -> None:
        hub.fault(SHARD, times=1000, status=404, headers={"X-Error-Code": "EntryNotFound"})
        report = download()
        assert report.exit_code is ExitCode.INCOMPLETE
        assert f"{SHARD}: expected it at" in messages(report)
        assert (out / SHARDS[0]).exists()
        assert not (out / INDEX_FILE).exists()

    def test_access_that_ends(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, times=1000, status=403)
        with pytest.raises(K3QuantError, match="access denied") as caught:
            download()
        assert caught.value.exit_code is ExitCode.USAGE

    @pytest.mark.parametrize("cut_at", [0, 1, 1000, 65536, 299_999])
    def test_cut_connection(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes], cut_at: int
    ) -> None:
        hub.fault(SHARD, times=2, cut_at=cut_at)
        assert download(jobs=1).ok  # several would help each other
        assert (out / SHARD).read_bytes() == files[SHARD]
        assert hub.sent(SHARD) == len(files[SHARD])

    def test_connection_that_is_always_cut_fails(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, times=100_000, cut_at=100)
        with pytest.raises(ResourceError, match=r"got 100 of .* bytes, 6 times in a row"):
            download()

    def test_answer_that_is_short_but_says_so(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARD, times=1, short_by=1000)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]

    @pytest.mark.parametrize("more", [-1000, 1000])
    def test_file_of_another_size_than_listed(
        self, hub: Any, repo: Any, download: Run, out: Path, more: int
    ) -> None:
        rows = [
            {"type": "file", "path": name, "size": len(data) + (more if name == SHARD else 0)}
            for name, data in repo.commits[repo.head].items()
        ]
        hub.fault("/tree/", times=100, status=200, body=json.dumps(rows).encode())
        with pytest.raises(ResourceError) as caught:
            download()
        assert f"got a file of 300074 bytes instead of {300_074 + more}" in caught.value.message
        assert not (out / SHARD).exists()

    def test_server_that_ignores_ranges(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault("/resolve/", times=100_000, ignore_range=True)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]
        assert hub.sent(SHARD) == len(files[SHARD])

    def test_server_that_ignores_ranges_and_cuts(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.fault(SHARD, times=1, ignore_range=True, cut_at=200_000)
        hub.fault(SHARD, times=100_000, ignore_range=True)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]

    def test_signed_address_that_runs_out(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.redirect = "other"
        hub.fault(f"/cdn/.*{SHARD}", cut_at=100_000)
        hub.fault(f"/cdn/.*{SHARD}", status=403)
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]

    def test_redirects_in_a_circle(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, times=1000, status=302, headers={"Location": f"/x/{SHARD}"})
        with pytest.raises(ResourceError, match="got 10 redirects"):
            download(attempts=2)

    def test_offer_of_xet_beside_http_changes_nothing(
        self, hub: Any, download: Run, out: Path, files: dict[str, bytes]
    ) -> None:
        hub.extra_headers = {"X-Xet-Hash": "a" * 64, "Link": '</xet>; rel="xet-auth"'}
        hub.redirect = "other"
        assert download().ok
        assert (out / SHARD).read_bytes() == files[SHARD]

    def test_xet_alone_without_a_place_for_tokens_is_said(self, hub: Any, download: Run) -> None:
        hub.fault(SHARD, times=1000, status=406, headers={"X-Xet-Hash": "a" * 64})
        with pytest.raises(ResourceError, match="an offer of Xet alone") as caught:
            download()
        assert "install hf_xet" in caught.value.hint

    def test_damaged_record(self, download: Run, out: Path) -> None:
        download()
        (out / "k3quant.download.json").write_text(json.dumps({"format": "x"}))
        with pytest.raises(K3QuantError, match="expected the record of a download") as caught:
            download()
        assert caught.value.exit_code is ExitCode.STRUCTURE
