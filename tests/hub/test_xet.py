"""Files that a server gives through Xet alone, from a store in a folder; without any network."""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import HashError, ResourceError
from k3quant.hub.source import HubSource
from k3quant.report import Report

hf_xet = pytest.importorskip("hf_xet")

Run = Callable[..., Report]
SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]


@pytest.fixture
def keep(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """Keep bytes in the store and return their hash."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "hf" / "xet"))
    hub.xet_place = f"local://{tmp_path / 'store'}"
    session = hf_xet.XetSession(hf_xet.XetConfig().with_config("telemetry.enabled", False))

    def upload(data: bytes) -> str:
        with session.new_upload_commit(endpoint=hub.xet_place) as commit:
            handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
        return str(handle.result().xet_info.hash)

    return upload


@pytest.fixture
def in_xet(hub: Any, keep: Callable[[bytes], str], files: dict[str, bytes]) -> None:
    """Give all shards through Xet alone."""
    hub.xet = {name: keep(files[name]) for name in SHARDS}


def asked_for_tokens(hub: Any) -> list[Any]:
    return [seen for seen in hub.seen if "xet-read-token" in seen.path]


@pytest.mark.usefixtures("in_xet")
def test_arrives_whole_and_proven(
    hub: Any, download: Run, out: Path, files: dict[str, bytes]
) -> None:
    report = download()
    assert report.ok, report.findings
    assert report.summary["state"] == "complete"
    for name in SHARDS:
        assert (out / name).read_bytes() == files[name]
    assert hub.sent("safetensors") == 0
    assert all(s.authorization == "Bearer hf_secret_of_the_test" for s in asked_for_tokens(hub))
    assert 1 <= len(asked_for_tokens(hub)) <= 4  # one for all, or one for each that came first


@pytest.mark.usefixtures("in_xet")
def test_checkpoint_is_opened_by_ranges(files: dict[str, bytes]) -> None:
    checkpoint = open_checkpoint(HubSource("hf://test/repo"))
    tensor = checkpoint.read("t2").tobytes()
    assert tensor == files[SHARDS[1]][-len(tensor) :]


def test_goes_on_with_what_arrived_over_http(
    hub: Any, keep: Callable[[bytes], str], download: Run, out: Path, files: dict[str, bytes]
) -> None:
    hub.fault(SHARDS[1], times=1000, cut_at=150_000)
    with pytest.raises(ResourceError):
        download(attempts=1, jobs=1)
    hub.faults.clear()
    hub.xet = {SHARDS[1]: keep(files[SHARDS[1]])}
    report = download()
    assert report.summary["resumed_bytes"] == 2 * (64 << 10)
    assert (out / SHARDS[1]).read_bytes() == files[SHARDS[1]]


def test_other_bytes_of_the_same_size_are_refused(
    hub: Any, keep: Callable[[bytes], str], download: Run, out: Path, files: dict[str, bytes]
) -> None:
    right = files[SHARDS[0]]
    wrong = right[:-1] + bytes([right[-1] ^ 1])
    hub.xet = {SHARDS[0]: keep(wrong)}
    report = download()
    (finding,) = [f for f in report.findings if f.subject == SHARDS[0]]
    assert report.exit_code == HashError.exit_code
    assert hashlib.sha256(right).hexdigest() in finding.message
    assert not (out / SHARDS[0]).exists()


def test_store_without_the_file_ends_it(
    hub: Any, keep: Callable[[bytes], str], download: Run, files: dict[str, bytes]
) -> None:
    keep(b"something else")
    hub.xet = {SHARDS[0]: "ab" * 32}
    with pytest.raises(ResourceError, match="from Xet, 2 times in a row"):
        download(attempts=2)
    assert len(asked_for_tokens(hub)) >= 2  # no old one is taken for another try


def test_store_that_does_not_answer_is_given_up(hub: Any, download: Run) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub.xet_place = f"http://127.0.0.1:{closed.getsockname()[1]}"
    hub.xet = {SHARDS[0]: "ab" * 32}
    began = monotonic()
    with pytest.raises(ResourceError, match="silence from Xet, 2 times in a row"):
        download(attempts=2, stall_timeout=0.5)
    assert monotonic() - began < 10


def test_token_without_an_address_is_said(hub: Any, download: Run) -> None:
    hub.xet = {SHARDS[0]: "ab" * 32}
    with pytest.raises(ResourceError, match="a Xet token without its address"):
        download(attempts=2)


@pytest.mark.usefixtures("in_xet")
def test_switched_off_it_is_not_used(
    hub: Any, download: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with pytest.raises(ResourceError, match="an offer of Xet alone") as caught:
        download()
    assert "HF_HUB_DISABLE_XET" in caught.value.hint
    assert asked_for_tokens(hub) == []
