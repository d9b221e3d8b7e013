"""The connections of a download: each has a file of its own while there are enough files.

When none is left to begin, a connection helps with the file that has most left.
"""

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from k3quant.errors import HashError, IncompleteError, K3QuantError
from k3quant.hub.client import HubClient
from k3quant.hub.patience import StoppedError
from k3quant.hub.transfer import FileTransfer

_LOOK_AGAIN = 0.1  # seconds between looks for a file to help with

# Faults of one file; any other fault is the network's, the disk's or the account's, and ends all.
_OF_ONE_FILE = (HashError, IncompleteError)


class Crew:
    """Runs the transfers of a download over a number of connections.

    Args:
        client: The endpoint; it is closed to end waits early.
        transfers: The files, in the order to begin them.
        jobs: Connections.
        landed: Called with each file that is whole under its name, one at a time.
        may_begin: Asked before the next file is begun, again and again until it may be; connections
            then help to finish what was begun first, so that files land one after the other. None
            lets every file begin.
    """

    def __init__(
        self,
        client: HubClient,
        transfers: list[FileTransfer],
        *,
        jobs: int,
        landed: Callable[[FileTransfer], None],
        may_begin: Callable[[FileTransfer], bool] | None = None,
    ) -> None:
        self._client = client
        self._waiting = deque(transfers)
        self._all = transfers
        self._begun: set[FileTransfer] = set()
        self._landed = landed
        self._may_begin = may_begin
        self._changed = Condition()
        self._unsettled = set(transfers)
        self._error: BaseException | None = None
        self._threads = [
            Thread(target=self._work, name=f"download-{i}", daemon=True)
            for i in range(jobs if transfers else 0)
        ]
        self.failed: list[tuple[FileTransfer, K3QuantError]] = []

    def run(self) -> None:
        """Fetch everything; faults of single files are left in `failed`.

        Raises:
            RefusedError: The server's files are not the listing's.
            ResourceError: The server or the disk failed.
            UsageError: Access is denied.
            StoppedError: The work was told to stop.
            KeyboardInterrupt: The user wants it to end; what arrived is kept.
        """
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._client.close()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()
            raise
        finally:
            for transfer in self._all:
                transfer.end()
        if self._error is not None:
            raise self._error
        if self._unsettled:  # somebody else closed the client
            raise StoppedError

    def _work(self) -> None:
        transfer: FileTransfer | None = None
        try:
            while not self._client.stop.is_set():
                transfer = self._next_file()
                if transfer is None:
                    return
                try:
                    self._serve(transfer)
                except _OF_ONE_FILE as error:
                    self._settle(transfer, error)
        except StoppedError:
            pass
        except BaseException as error:  # `run` raises it again
            with self._changed:
                self._error = self._error or error
            self._client.close()

    def _next_file(self) -> FileTransfer | None:
        """Return a file that nobody has begun, or one that can use help."""
        with self._changed:
            while self._unsettled and not self._client.stop.is_set():
                helped = [t for t in self._all if t in self._begun and self._can_help(t)]
                if self._may_begin is None:
                    if self._waiting:
                        return self._waiting.popleft()
                    if helped:
                        return max(helped, key=lambda t: t.num_free)
                elif helped and not self._begins_before(helped[0]):
                    return helped[0]
                elif not helped and self._waiting and self._may_begin(self._waiting[0]):
                    return self._waiting.popleft()
                self._changed.wait(_LOOK_AGAIN)
        return None

    def _begins_before(self, transfer: FileTransfer) -> bool:
        """Return whether a file in front of this one was taken and is just being opened."""
        for other in self._all:
            if other is transfer:
                return False
            if other in self._unsettled - self._begun and other not in self._waiting:
                return True
        return False

    def _can_help(self, transfer: FileTransfer) -> bool:
        # A server that ignores ranges would send the whole file to each helper.
        few = transfer.num_free < 2
        return not (few or transfer.over) and transfer.content.may_be_shared

    def _serve(self, transfer: FileTransfer) -> None:
        if transfer in self._begun:
            piece = transfer.claim_far()
        else:
            transfer.begin()
            with self._changed:
                self._begun.add(transfer)
                self._changed.notify_all()
            piece = transfer.claim_first()
        while piece is not None:
            transfer.fetch(piece)
            piece = transfer.claim_first()
        if transfer.proof is not None:
            self._settle(transfer, None)

    def _settle(self, transfer: FileTransfer, error: K3QuantError | None) -> None:
        with self._changed:
            # Whoever else was at work on the file comes here too.
            if transfer not in self._unsettled:
                return
            self._unsettled.remove(transfer)
            transfer.over = True
            self._begun.discard(transfer)
            if error is not None:
                self.failed.append((transfer, error))
            else:
                self._landed(transfer)
            self._changed.notify_all()
