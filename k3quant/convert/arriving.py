"""Source shards on their way: fetched in the order of use, proven, removed after their last use.

The engine begins an output file once all its shards are there, and tells when it is finished.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from threading import Condition, Event, Thread

from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.convert.arrival import ArrivalPlan
from k3quant.convert.arriving_source import ArrivingSource
from k3quant.convert.export_plan import FilePlan
from k3quant.hub.client import HubClient
from k3quant.hub.crew import Crew
from k3quant.hub.digest import Proof
from k3quant.hub.existing import hash_files
from k3quant.hub.partial import Partial
from k3quant.hub.patience import StoppedError
from k3quant.hub.plan import DownloadPlan
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.transfer import FileTransfer
from k3quant.progress import SILENT, Progress
from k3quant.sizes import format_size

_LOOK_AGAIN = 0.1  # seconds between looks at what has failed meanwhile


class Arriving:
    """Fetches what output files need, in their order and within the room: a `Supply`.

    Args:
        client: The endpoint; it is closed at the end.
        source: Where the engine reads.
        plan: The download into the folder where files lie meanwhile.
        arrival: What is needed when.
        beside: Files beside the weights that the export copies.
        settings: Connections and pieces.
        progress: Told what is being waited for.
    """

    def __init__(
        self,
        client: HubClient,
        source: ArrivingSource,
        plan: DownloadPlan,
        arrival: ArrivalPlan,
        *,
        beside: Collection[str],
        settings: DownloadSettings,
        progress: Progress,
    ) -> None:
        self._client = client
        self._source = source
        self._plan = plan
        self._arrival = arrival
        self._beside = beside
        self._settings = settings
        self._progress = progress
        self._changed = Condition()
        self._digests: dict[str, str] = {}
        self._unfinished = dict(arrival.needs)
        self._held_bytes = 0
        self._arrived_bytes = 0
        self._fault: BaseException | None = None

    def in_turn(self, todo: Iterable[FilePlan], failed: Event) -> Iterator[FilePlan]:
        """Yield each file once its shards have arrived.

        Raises:
            HashError: A file was twice not what it must be.
            IncompleteError: The server has lost a file.
            RefusedError: The server's files are not the listing's.
            ResourceError: The server or the disk failed.
            UsageError: Access is denied.
        """
        crew = self._begin()
        thread = Thread(target=self._fetch, args=(crew,), name="arriving", daemon=True)
        thread.start()
        try:
            for plan in todo:
                if not self._wait_for(self._arrival.needs[plan.name], crew, failed):
                    return
                yield plan
            self._wait_for(self._beside, crew, failed)
        finally:
            self._client.close()
            thread.join()

    def finished(self, plan: FilePlan) -> None:
        """Remove the shards that no other output file needs."""
        with self._changed:
            needed = self._unfinished.pop(plan.name)
            spent = needed - frozenset[str]().union(*self._unfinished.values())
            self._source.here -= spent
        for file in spent:
            (self._source.folder / file).unlink()
        with self._changed:
            self._held_bytes -= sum(self._arrival.sizes[file] for file in spent)

    def digest_of(self, file: str) -> str | None:
        """Return the digest that was proven when the shard arrived."""
        return self._digests.get(file)

    def _begin(self) -> Crew:
        """Keep what an earlier run left of the first files, and line up all others."""
        self._source.open_folder()
        names = [*self._beside, *self._arrival.order]
        self._remove_others({*self._beside, *self._arrival.first_shards})
        self._check_what_is_there(names)
        contents = {content.name: content for content in self._plan.contents}
        transfers = [
            FileTransfer(
                Partial(
                    self._source.folder / name,
                    contents[name],
                    commit=self._plan.listing.pinned.revision,
                    piece_bytes=self._settings.piece_bytes,
                ),
                self._plan.expected[name],
                told=self._told,
                stop=self._client.stop,
            )
            for name in names
            if name not in self._source.here
        ]
        return Crew(
            self._client,
            transfers,
            jobs=self._settings.jobs,
            landed=self._landed,
            may_begin=self._has_room,
        )

    def _remove_others(self, kept: set[str]) -> None:
        """Remove shards that were used, or came further ahead than the room allows now."""
        folder = self._source.folder
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix().partition(PARTIAL_SUFFIX)[0]
            if path.is_file() and name not in kept:
                path.unlink()

    def _check_what_is_there(self, names: Iterable[str]) -> None:
        folder, expected = self._source.folder, self._plan.expected
        there = {name: expected[name] for name in names if _size(folder / name) is not None}
        whole = {name: e for name, e in there.items() if _size(folder / name) == e.size}
        verdicts = hash_files(folder, whole, SILENT, stop=self._client.stop)
        for name in there:
            verdict = verdicts.get(name)
            if isinstance(verdict, Proof):
                self._note_here(name, verdict)
                self._held_bytes += self._arrival.sizes.get(name, 0)
            else:
                (folder / name).unlink()

    def _fetch(self, crew: Crew) -> None:
        try:
            crew.run()
        except StoppedError:
            pass  # whoever closed the client knows why
        except BaseException as error:  # `in_turn` raises it again
            self._fault = error
        with self._changed:
            self._changed.notify_all()

    def _has_room(self, transfer: FileTransfer) -> bool:
        size = self._arrival.sizes.get(transfer.content.name)
        if size is None:
            return True
        with self._changed:
            if self._held_bytes + size > self._arrival.room_bytes:
                return False
            self._held_bytes += size
            return True

    def _landed(self, transfer: FileTransfer) -> None:
        assert transfer.proof is not None
        with self._changed:
            self._note_here(transfer.content.name, transfer.proof)
            self._changed.notify_all()

    def _note_here(self, name: str, proof: Proof) -> None:
        self._digests[name] = proof.sha256
        self._source.here.add(name)

    def _told(self, count: int) -> None:
        with self._changed:
            self._arrived_bytes += count

    def _wait_for(self, files: Collection[str], crew: Crew, failed: Event) -> bool:
        """Wait until files are there; False where the work has failed elsewhere."""
        with self._changed:
            while absent := sorted(set(files) - self._source.here):
                if failed.is_set():
                    return False
                if self._fault is not None:
                    raise self._fault
                if crew.failed:
                    raise crew.failed[0][1]
                arrived = format_size(self._arrived_bytes)
                self._progress.note(f"{absent[0]} is on its way, {arrived} arrived")
                self._changed.wait(_LOOK_AGAIN)
        for file in self._arrival.sizes.keys() & files:
            self._source.check_header(file)
        return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
