from time import monotonic
from typing import Any

import pytest

from k3quant.errors import ExitCode, K3QuantError, ResourceError, StructureError, UsageError
from k3quant.hub.client import HubClient
from k3quant.hub.listing import list_files
from k3quant.hub.patience import RetryPolicy
from k3quant.hub.reference import Reference, parse_reference

REFERENCE = Reference("test/repo")


def client(**changes: Any) -> HubClient:
    policy = RetryPolicy(attempts=3, first_wait=0.01, **changes)
    return HubClient(stall_timeout=0.5, policy=policy)


def test_lists_sizes_and_digests(hub: Any, hub_server: Any, files: dict[str, bytes]) -> None:
    listing = list_files(client(), REFERENCE)
    assert listing.pinned.revision == hub.repos["test/repo"].head
    assert {name: file.size for name, file in listing.files.items()} == {
        name: len(data) for name, data in files.items()
    }
    shard = listing.files["model-00001-of-000003.safetensors"]
    assert shard.sha256 == hub_server.sha256_of(files[shard.name])
    assert shard.blob_id is None
    config = listing.files["config.json"]
    assert (config.sha256, config.blob_id) == (None, hub_server.blob_of(files["config.json"]))


def test_folders_are_no_files(hub: Any) -> None:
    assert "assets" not in list_files(client(), REFERENCE).files


def test_pages_are_followed(hub: Any, files: dict[str, bytes]) -> None:
    hub.page_size = 2
    assert list_files(client(), REFERENCE).files.keys() == files.keys()
    assert sum("/tree/" in seen.path for seen in hub.seen) > 5


def test_everything_names_the_commit_after_it_is_resolved(hub: Any) -> None:
    list_files(client(), REFERENCE)
    assert [seen.path for seen in hub.seen if "main" in seen.path] == [
        "/api/models/test/repo/revision/main"
    ]


def test_token_goes_to_the_endpoint(hub: Any) -> None:
    hub.token = "hf_secret_of_the_test"
    assert list_files(client(), REFERENCE).files


@pytest.mark.parametrize(
    ("reference", "fault", "exit_code", "words"),
    [
        pytest.param("test/other", {}, ExitCode.USAGE, "no such repository", id="repository"),
        pytest.param("test/repo@v9", {}, ExitCode.USAGE, "no such revision", id="revision"),
        pytest.param("test/repo", {"status": 401}, ExitCode.USAGE, "HTTP 401", id="no-token"),
        pytest.param(
            "test/repo",
            {"status": 403, "headers": {"X-Error-Code": "GatedRepo"}},
            ExitCode.USAGE,
            "access denied",
            id="gated",
        ),
        pytest.param("test/repo", {"status": 503}, ExitCode.IO, "HTTP 503", id="unavailable"),
        pytest.param("test/repo", {"status": 429}, ExitCode.IO, "HTTP 429", id="rate-limited"),
        pytest.param("test/repo", {"status": 418}, ExitCode.IO, "HTTP 418", id="unexpected"),
        pytest.param(
            "test/repo",
            {"stall_at": 1, "status": 200, "body": b"{}"},
            ExitCode.IO,
            "silence",
            id="stall",
        ),
        pytest.param(
            "test/repo",
            {"status": 200, "body": b"<!DOCTYPE html>"},
            ExitCode.IO,
            "no JSON",
            id="html",
        ),
        pytest.param(
            "test/repo",
            {"status": 200, "body": b"{}"},
            ExitCode.IO,
            "expected a commit",
            id="empty",
        ),
    ],
)
def test_failures_are_told_apart(
    hub: Any, reference: str, fault: dict[str, Any], exit_code: ExitCode, words: str
) -> None:
    if fault:
        hub.fault("/api/", times=100, **fault)
    began = monotonic()
    with pytest.raises(K3QuantError) as caught:
        list_files(client(), parse_reference(reference))
    assert monotonic() - began < 5
    assert caught.value.exit_code is exit_code
    assert words in caught.value.message
    assert "hf_secret" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_passing_trouble_is_waited_out(hub: Any, status: int) -> None:
    hub.fault("/tree/", times=2, status=status)
    assert list_files(client(), REFERENCE).files


def test_retry_after_is_honoured(hub: Any) -> None:
    hub.fault("/tree/", status=429, headers={"Retry-After": "1"})
    began = monotonic()
    assert list_files(client(), REFERENCE).files
    assert 1.0 <= monotonic() - began < 3


def test_retries_are_bounded_and_name_status_and_url(hub: Any) -> None:
    hub.fault("/tree/", times=100, status=503)
    with pytest.raises(ResourceError) as caught:
        list_files(client(), REFERENCE)
    assert "HTTP 503, 3 times in a row" in caught.value.message
    assert f"{hub.url}/api/models/test/repo/tree/" in caught.value.message
    assert sum("/tree/" in seen.path for seen in hub.seen) == 3


def test_unreachable_endpoint(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    with pytest.raises(ResourceError, match="a refused connection, 3 times in a row"):
        list_files(client(), REFERENCE)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\evil"])
def test_names_outside_the_repository_are_refused(hub: Any, name: str) -> None:
    rows = f'[{{"type": "file", "path": {name!r}, "size": 3, "oid": "0"}}]'
    hub.fault("/tree/", status=200, body=rows.replace("'", '"').encode())
    with pytest.raises(StructureError, match="inside the repository"):
        list_files(client(), REFERENCE)


def test_listing_without_sizes_is_refused(hub: Any) -> None:
    hub.fault("/tree/", status=200, body=b'[{"type": "file", "path": "a"}]')
    with pytest.raises(ResourceError, match="expected a path and a size for each file"):
        list_files(client(), REFERENCE)


def test_offline_mode_of_the_hub_client_is_respected(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        client()
    assert not hub.seen


def test_endpoint_must_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "ftp://hub")
    with pytest.raises(UsageError, match="expected an http or https URL"):
        client()
