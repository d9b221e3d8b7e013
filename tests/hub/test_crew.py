"""How connections are shared among files."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from time import sleep
from types import SimpleNamespace
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


class Pieces:
    """A transfer without a network: so many pieces, and what was free elsewhere at each help."""

    def __init__(self, before: "list[Pieces]", *, pieces: int, slow_to_begin: float) -> None:
        self.content = SimpleNamespace(may_be_shared=True)
        self.over = False
        self.proof: object | None = None
        self.helped_while_free: list[int] = []
        self._before = list(before)
        self._slow_to_begin = slow_to_begin
        self._lock = Lock()
        self._free = self._missing = pieces

    @property
    def num_free(self) -> int:
        return self._free

    def begin(self) -> None:
        sleep(self._slow_to_begin)

    def end(self) -> None: ...

    def claim_far(self) -> int | None:
        self.helped_while_free += [t.num_free for t in self._before]
        return self.claim_first()

    def claim_first(self) -> int | None:
        with self._lock:
            if not self._free:
                return None
            self._free -= 1
            return self._free

    def fetch(self, piece: int) -> None:
        sleep(0.001)
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self.proof = object()


def test_connections_help_a_file_only_when_those_before_it_need_none() -> None:
    first = Pieces([], pieces=40, slow_to_begin=0.05)
    second = Pieces([first], pieces=400, slow_to_begin=0.0)
    third = Pieces([first, second], pieces=400, slow_to_begin=0.0)
    landed: list[Pieces] = []
    client = SimpleNamespace(stop=Event(), close=lambda: None)
    Crew(
        client, [first, second, third], jobs=8, landed=landed.append, may_begin=lambda _: True
    ).run()  # type: ignore[arg-type]
    assert len(landed) == 3
    assert second.helped_while_free
    assert max(second.helped_while_free) < 2
    assert max(third.helped_while_free, default=0) < 2


def test_file_waits_until_it_may_begin(
    hub: Any, repo: Any, toy: Toy, settings: DownloadSettings, out: Path
) -> None:
    repo.commit(toy(SIZE))
    # One after the other
    seen = land(settings, out, lambda whole: lambda t: len(whole) >= SHARDS.index(t.content.name))
    assert seen[0][SHARDS[1]] == seen[0][SHARDS[2]] == seen[1][SHARDS[2]] == 0
