"""How connections are shared among files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3quant.hub.crew import Crew
from k3quant.hub.partial import Partial
from k3quant.hub.plan import plan_download
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.transfer import FileTransfer

SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]
SIZE = 2_000_000
Toy = Callable[[int], dict[str, bytes]]
MayBegin = Callable[[FileTransfer], bool]


def land(
    settings: DownloadSettings, out: Path, may_begin: Callable[[set[str]], MayBegin]
) -> list[dict[str, int]]:
    """Fetch three shards over six connections; return what each had whenever one was whole."""
    client = settings.client()
    plan = plan_download(parse_reference("test/repo"), out, settings, client=client)
    transfers = [
        FileTransfer(
            Partial(
                out / content.name,
                content,
                commit=plan.listing.pinned.revision,
                piece_bytes=settings.piece_bytes,
            ),
            plan.expected[content.name],
            told=lambda _: None,
            stop=client.stop,
        )
        for content in plan.contents
        if content.name in SHARDS
    ]
    whole: set[str] = set()
    seen: list[dict[str, int]] = []

    def landed(transfer: FileTransfer) -> None:
        whole.add(transfer.content.name)
        seen.append({t.content.name: t.partial.done_bytes for t in transfers})

    Crew(client, transfers, jobs=6, landed=landed, may_begin=may_begin(whole)).run()
    client.close()
    assert whole == set(SHARDS)
    return seen


def test_connections_finish_first_what_was_begun_first(
    hub: Any, repo: Any, toy: Toy, settings: DownloadSettings, out: Path
) -> None:
    repo.commit(toy(SIZE))
    hub.bytes_per_second = 1e6
    first, second, _ = land(settings, out, lambda _: lambda _: True)
    assert first[SHARDS[0]] > SIZE > 2 * first[SHARDS[2]]
    assert second[SHARDS[1]] > SIZE > second[SHARDS[2]]


def test_file_waits_until_it_may_begin(
    hub: Any, repo: Any, toy: Toy, settings: DownloadSettings, out: Path
) -> None:
    repo.commit(toy(SIZE))
    # One after the other
    seen = land(settings, out, lambda whole: lambda t: len(whole) >= SHARDS.index(t.content.name))
    assert seen[0][SHARDS[1]] == seen[0][SHARDS[2]] == seen[1][SHARDS[2]] == 0
