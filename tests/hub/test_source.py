import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from k3quant.checkpoint.header import scan_header
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import IncompleteError, RefusedError, ResourceError
from k3quant.hub.client import HubClient
from k3quant.hub.patience import RetryPolicy
from k3quant.hub.source import HEAD_BYTES, HubSource
from k3quant.manifest_create import create_manifest

Toy = Callable[[int], dict[str, bytes]]

SHARD = "model-00002-of-000003.safetensors"


def open_source(stall_timeout: float = 1.0) -> HubSource:
    policy = RetryPolicy(attempts=4, first_wait=0.01)
    client = HubClient(stall_timeout=stall_timeout, policy=policy)
    return HubSource("hf://test/repo@main", client=client)


def requests_by_file(hub: Any) -> Counter[str]:
    return Counter(seen.path.rpartition("/")[2] for seen in hub.files_asked())


def test_opens_as_a_checkpoint(hub: Any, files: dict[str, bytes]) -> None:
    checkpoint = open_checkpoint(open_source())
    assert checkpoint.source.label == f"hf://test/repo@{hub.repos['test/repo'].head}"
    tensor = checkpoint.read("t2")
    assert tensor.tobytes() == files[SHARD][-len(tensor) :]


@pytest.mark.parametrize("redirect", [None, "same", "other"])
def test_header_costs_one_request(hub: Any, redirect: str | None) -> None:
    hub.redirect = redirect
    open_checkpoint(open_source())
    shards = {f: n for f, n in requests_by_file(hub).items() if ".safetensors?" in f or f == SHARD}
    assert set(shards.values()) == {1}


def test_header_longer_than_the_first_read_costs_two(hub: Any, hub_server: Any, repo: Any) -> None:
    length = HEAD_BYTES + 5000
    raw = struct.pack("<Q", length) + b'{"__metadata__":{"a":"' + b"x" * (length - 25) + b'"}}'
    repo.commit({SHARD: raw})
    source = open_source()
    scan = scan_header(
        lambda offset, size: source.read(SHARD, offset, size), file=SHARD, file_bytes=len(raw)
    )
    assert not scan.findings
    assert requests_by_file(hub)[SHARD] == 2
    assert hub.sent() == len(raw)


def test_headers_are_fetched_side_by_side_once(hub: Any) -> None:
    source = open_source()
    shards = [f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)]
    source.prefetch_headers(shards, jobs=3)
    asked = len(hub.files_asked())
    assert asked == 3
    open_checkpoint(source)
    assert len(hub.files_asked()) == asked + 2  # config and index


def test_checkpoint_is_opened_over_several_connections(hub: Any) -> None:
    hub.bytes_per_second = 2e6  # so that each header takes its time
    open_checkpoint(open_source())
    shards = [seen for seen in hub.files_asked() if ".safetensors" in seen.path.partition("?")[0]]
    index = [seen for seen in shards if "index.json" in seen.path]
    assert len({seen.connection for seen in shards if seen not in index}) == 3


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        pytest.param(0, 10, id="head"),
        pytest.param(5, 100_000, id="across-the-header"),
        pytest.param(299_000, 10_000, id="beyond-the-end"),
        pytest.param(400_000, 10, id="after-the-end"),
        pytest.param(100, 0, id="nothing"),
    ],
)
def test_read_gives_the_file_s_bytes(
    hub: Any, files: dict[str, bytes], offset: int, length: int
) -> None:
    data = open_source().read(SHARD, offset, length)
    assert data == files[SHARD][offset : offset + length]


def test_reads_from_many_threads(hub: Any, files: dict[str, bytes]) -> None:
    source = open_source()

    def check(offset: int) -> bool:
        buffer = np.zeros(5000, np.uint8)
        source.read_into(SHARD, offset, memoryview(buffer))
        return buffer.tobytes() == files[SHARD][offset : offset + 5000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(0, 290_000, 3000)))
    connections = {seen.connection for seen in hub.files_asked()}
    assert len(connections) <= 9


def test_connections_are_kept(hub: Any) -> None:
    source = open_source()
    for offset in range(0, 100_000, 1000):
        source.read("tiktoken.model", offset % 1000, 50)
    assert len({seen.connection for seen in hub.seen}) == 1


def test_read_goes_on_where_a_connection_was_lost(hub: Any, files: dict[str, bytes]) -> None:
    hub.fault(SHARD, times=2, cut_at=100_000)
    buffer = bytearray(len(files[SHARD]))
    open_source().read_into(SHARD, 0, memoryview(buffer))
    assert buffer == files[SHARD]
    assert hub.sent() < len(files[SHARD]) + 1000


def test_read_into_beyond_the_end(hub: Any, files: dict[str, bytes]) -> None:
    size = len(files[SHARD])
    with pytest.raises(IncompleteError, match=f"offset {size - 5}, got 5"):
        open_source().read_into(SHARD, size - 5, memoryview(bytearray(10)))


def test_unknown_file(hub: Any) -> None:
    with pytest.raises(IncompleteError, match=r"expected nothing\.bin, got none of that name"):
        open_source().read("nothing.bin", 0, 1)


def test_server_that_ignores_ranges_is_refused_without_reading_it_all(
    hub: Any, repo: Any, toy: Toy
) -> None:
    repo.commit(toy(5_000_000))
    source = open_source()
    hub.fault(SHARD, times=100, ignore_range=True, bytes_per_second=10e6)
    with pytest.raises(ResourceError, match="the server ignores ranges"):
        source.read(SHARD, 0, 8)
    assert len(hub.files_asked()) == 1
    assert hub.sent() < 1_000_000


def test_signed_address_is_kept_and_renewed_when_it_runs_out(
    hub: Any, files: dict[str, bytes]
) -> None:
    hub.redirect = "other"
    source = open_source()
    for offset in (0, 1000, 2000):
        source.read("tiktoken.model", offset % 1200, 10)
    resolved = [seen for seen in hub.seen if "/resolve/" in seen.path]
    assert len(resolved) == 1
    hub.expired_signatures.add("s0")
    hub.signature = "s1"
    assert source.read("tiktoken.model", 10, 10) == files["tiktoken.model"][10:20]
    assert len([seen for seen in hub.seen if "/resolve/" in seen.path]) == 2


def test_token_never_leaves_the_endpoint(hub: Any) -> None:
    hub.redirect = "other"
    hub.token = "hf_secret_of_the_test"
    open_source().read(SHARD, 0, 100)
    elsewhere = [seen for seen in hub.seen if seen.path.startswith("/cdn/")]
    assert elsewhere
    assert all(seen.host.startswith("localhost") for seen in elsewhere)
    assert not any(seen.authorization for seen in elsewhere)


def test_signature_of_an_address_is_in_no_message(hub: Any) -> None:
    hub.redirect = "other"
    source = open_source()
    hub.fault("/cdn/", times=100, status=503)
    with pytest.raises(ResourceError) as caught:
        source.read(SHARD, 0, 100)
    assert "secret" not in caught.value.message


def test_other_commit_is_refused(hub: Any) -> None:
    source = open_source()
    hub.fault("/resolve/", status=200, headers={"X-Repo-Commit": "f" * 40})
    with pytest.raises(RefusedError, match=f"got {'f' * 40}"):
        source.read("config.json", 0, 10)


def test_other_digest_than_listed_is_refused(hub: Any) -> None:
    source = open_source()
    head = hub.repos["test/repo"].head
    headers = {"X-Repo-Commit": head, "X-Linked-Etag": f'"{"e" * 64}"'}
    hub.fault("/resolve/", status=200, headers=headers)
    with pytest.raises(RefusedError, match=f"got a file of {'e' * 64}"):
        source.read(SHARD, 0, 10)


def test_branch_that_moves_changes_nothing(hub: Any, repo: Any, files: dict[str, bytes]) -> None:
    source = open_source()
    repo.commit({"config.json": b"another"})
    assert source.read("config.json", 0, 1000) == files["config.json"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"stall_at": 1000}, id="stall"),
        pytest.param({"bytes_per_second": 300.0}, id="trickle"),
        pytest.param({"cut_at": 1000}, id="cut"),
        pytest.param({"short_by": 299_000}, id="short"),
    ],
)
def test_server_that_never_gets_anywhere_is_given_up(hub: Any, fault: dict[str, Any]) -> None:
    source = open_source(stall_timeout=0.2)
    hub.fault(SHARD, times=1000, **fault)
    with pytest.raises(ResourceError, match="4 times in a row"):
        source.read(SHARD, 0, 250_000)


def test_manifest_of_a_repository_reads_no_payload(
    hub: Any, hub_server: Any, repo: Any, toy: Toy
) -> None:
    files = toy(5_000_000)
    repo.commit(files)
    manifest = create_manifest(open_source(), name="toy")
    assert {SHARD, "config.json", "tiktoken.model"} <= manifest.files.keys()
    for file, record in manifest.files.items():
        assert (record.bytes, record.sha256) == (
            len(files[file]),
            hub_server.sha256_of(files[file]),
        )
    assert hub.sent(SHARD) <= HEAD_BYTES
