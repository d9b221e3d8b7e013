"""`verify` over a repository: what it costs, and that it finds what it would find here."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from k3quant.errors import HashError
from k3quant.hub.client import HubClient
from k3quant.hub.patience import RetryPolicy
from k3quant.hub.source import HubSource
from k3quant.verify.run import Level, VerifySettings, verify

CHECKPOINT = Path(__file__).parents[1] / "data" / "oracle" / "ckpt_k3"


@pytest.fixture(autouse=True)
def served(hub: Any, hub_server: Any, repo: Any) -> dict[str, bytes]:
    files = {name: path.read_bytes() for name, path in hub_server.folder_files(CHECKPOINT).items()}
    repo.commit(files)
    return files


def source() -> HubSource:
    policy = RetryPolicy(attempts=3, first_wait=0.01)
    return HubSource("hf://test/repo", client=HubClient(policy=policy))


@pytest.mark.parametrize("level", [Level.HEADERS, Level.SCHEMA])
def test_costs_at_most_two_requests_a_shard(hub: Any, level: Level) -> None:
    report = verify(source(), VerifySettings(level=level))
    assert report.ok, report.findings
    requests = Counter(seen.path.rpartition("/")[2] for seen in hub.files_asked())
    assert max(n for file, n in requests.items() if file.endswith(".safetensors")) <= 2


def test_finds_a_shard_that_is_short(hub: Any, repo: Any, served: dict[str, bytes]) -> None:
    shard = "model-00003-of-000012.safetensors"
    repo.commit({**served, shard: served[shard][:-1000]})
    report = verify(source(), VerifySettings(level=Level.HEADERS))
    assert report.exit_code == 3
    assert any("short by 1000 bytes" in finding.message for finding in report.findings)


def test_config_that_is_changed_on_the_way_is_found(hub: Any) -> None:
    hub.fault("config.json", times=100, flip_at=20)
    with pytest.raises(HashError, match=r"config\.json: expected [0-9a-f]{40}"):
        source().read("config.json", 0, 1 << 20)


def test_config_that_was_changed_once_is_read_again(hub: Any, served: dict[str, bytes]) -> None:
    hub.fault("config.json", flip_at=20)
    assert source().read("config.json", 0, 1 << 20) == served["config.json"]
