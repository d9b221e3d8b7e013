"""Bytes of a remote file from any offset, across lost connections, stalls and refusals."""

import re
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from threading import Lock

from k3quant.errors import IncompleteError, RefusedError, ResourceError
from k3quant.hub.client import Answer, HubClient, XetAloneError, plain
from k3quant.hub.listing import HubFile, Listing
from k3quant.hub.patience import Patience, StoppedError, TransientError
from k3quant.hub.rate_limit import RateLimit
from k3quant.hub.xet import XetOffer, XetReader, find_hf_xet, offer_of

# A connection that brings less than this in `stall_timeout` counts as stalled: some servers keep
# one alive with a byte now and then.
_STALL_BYTES = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class RangeReader:
    """Reads ranges of the files of one listing, from any number of threads.

    Args:
        client: The endpoint.
        listing: The files.
        limit: A ceiling on bytes per second.
    """

    def __init__(
        self, client: HubClient, listing: Listing, *, limit: RateLimit | None = None
    ) -> None:
        self._client = client
        self._pinned = listing.pinned
        self._limit = limit or RateLimit(None, client.stop)
        self._lock = Lock()
        self._places: dict[str, str] = {}
        self._gives_ranges: dict[str, bool] = {}
        self._xet: XetReader | None = None
        self._xet_offers: dict[str, XetOffer] = {}
        self._faults = 0

    @property
    def num_faults(self) -> int:
        """Connections that failed, stalled or were refused so far."""
        return self._faults

    def gives_ranges(self, file: HubFile) -> bool:
        """Return whether the server was seen to answer a range of a file with that range."""
        return self._gives_ranges.get(file.name, False)

    def stream(
        self, file: HubFile, begin: int, end: int, *, whole_allowed: bool = False
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a range, going on where a lost connection left off.

        Args:
            file: The file.
            begin: First byte.
            end: Byte after the last.
            whole_allowed: Whether a server that ignores ranges may send the file from its start,
                of which what lies before `begin` is dropped.

        Raises:
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
            RefusedError: The server's file is not the listing's.
            IncompleteError: The file is gone.
            UsageError: Access is denied.
            StoppedError: The work was told to stop meanwhile.
        """
        url = self._url(file)
        patience = Patience(
            self._client.policy, f"{url}: expected bytes {begin}-{end - 1}", self._client.stop
        )
        offset = begin
        while offset < end:
            try:
                for chunk in self._attempt(file, offset, end, whole_allowed=whole_allowed):
                    offset += len(chunk)
                    patience.progressed(len(chunk))
                    yield chunk
            except TransientError as fault:
                if self._client.stop.is_set():
                    raise StoppedError from fault
                with self._lock:
                    self._faults += 1
                patience.wait_after(fault)

    def read(self, file: HubFile, begin: int, end: int) -> bytes:
        """Return the bytes of a range.

        Raises:
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
            RefusedError: The server's file is not the listing's.
            IncompleteError: The file is gone.
            UsageError: Access is denied.
            StoppedError: The work was told to stop meanwhile.
        """
        return b"".join(self.stream(file, begin, end))

    def _attempt(
        self, file: HubFile, offset: int, end: int, *, whole_allowed: bool
    ) -> Iterator[bytes]:
        answer = None if file.name in self._xet_offers else self._open(file, offset, end)
        if answer is None:
            assert self._xet is not None
            yield from self._watched(self._xet.stream(self._xet_offers[file.name], offset, end))
            return
        left = end - offset
        skip = self._bytes_before(file, answer, offset, end, whole_allowed=whole_allowed)
        chunks = answer.reply.chunks()
        try:
            for chunk in self._watched(chunks):
                piece = chunk[skip:] if skip else chunk
                skip = max(skip - len(chunk), 0)
                if not piece:
                    continue
                piece = piece[:left]
                left -= len(piece)
                yield piece
                if not left:
                    break
            if not left:
                # Running past the last byte tells the connection that it can be used again.
                with suppress(TransientError):
                    next(chunks, b"")
        finally:
            answer.reply.close()
        if left:
            raise TransientError(f"{end - offset - left} of {end - offset} bytes")

    def _open(self, file: HubFile, offset: int, end: int) -> Answer | None:
        """Ask for a range; None where the file is to be had through Xet alone."""
        place = self._places.get(file.name)
        url = place or self._url(file)
        answer = self._client.get(url, headers={"Range": f"bytes={offset}-{end - 1}"})
        try:
            self._client.check_status(answer, subject=file.name, success={200, 206})
        except TransientError:
            self._places.pop(file.name, None)  # a signed address runs out
            raise
        except XetAloneError:
            if not self._take_offer(file, answer):
                raise
            return None
        try:
            self._refuse_other_file(file, answer)
        except RefusedError:
            answer.reply.close()
            raise
        if answer.url != self._url(file):
            self._places[file.name] = answer.url
        return answer

    def _take_offer(self, file: HubFile, answer: Answer) -> bool:
        """Turn to Xet for a file, where the server offers it and hf_xet is there to fetch it."""
        offer, module = offer_of(answer, file.size), find_hf_xet()
        if offer is None or module is None:
            return False
        self._refuse_other_file(file, answer)
        with self._lock:
            self._xet = self._xet or XetReader(self._client, module)
            self._xet_offers[file.name] = offer
            self._gives_ranges[file.name] = True
        return True

    def _bytes_before(
        self, file: HubFile, answer: Answer, offset: int, end: int, *, whole_allowed: bool
    ) -> int:
        """Return how many bytes of a body come before the range that was asked for."""
        headers = answer.reply.headers
        if answer.reply.status == 206:
            match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
            if match is None or int(match[1]) != offset:
                answer.reply.close()
                raise TransientError(f"another range, `{headers.get('content-range')}`")
            if match[3] not in {"*", str(file.size)}:
                answer.reply.close()
                raise TransientError(f"a file of {match[3]} bytes instead of {file.size}")
            self._gives_ranges[file.name] = True
            return 0
        stated = headers.get("content-length")
        if stated is not None and stated != str(file.size):
            answer.reply.close()
            raise TransientError(f"a file of {stated} bytes instead of {file.size}")
        if not whole_allowed and end - offset < file.size:
            answer.reply.close()
            raise ResourceError(
                f"{plain(answer.url)}: expected bytes {offset}-{end - 1} with HTTP 206, got HTTP "
                "200: the server ignores ranges",
                hint="use an endpoint that knows ranges, or download the files and check them here",
            )
        return offset

    def _refuse_other_file(self, file: HubFile, answer: Answer) -> None:
        commit = answer.hub_headers.get("x-repo-commit", self._pinned.revision)
        if commit != self._pinned.revision:
            raise RefusedError(
                f"{file.name}: expected it from commit {self._pinned.revision}, got {commit}",
                hint="the server gives another revision than it was asked for",
            )
        etag = answer.hub_headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if file.sha256 is not None and etag and etag != file.sha256:
            raise RefusedError(
                f"{file.name}: expected sha256 {file.sha256} as listed, got a file of {etag}",
                hint="the server's listing and its files do not agree",
            )

    def _watched(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Pass chunks on within the rate limit, and end a connection that brings next to none."""
        waited, got = 0.0, 0
        while True:
            if self._client.stop.is_set():
                raise StoppedError
            began = time.monotonic()
            chunk = next(chunks, None)
            if chunk is None:
                return
            waited += time.monotonic() - began
            got += len(chunk)
            self._limit.spend(len(chunk))
            yield chunk
            if waited >= self._client.stall_timeout:
                if got < _STALL_BYTES:
                    raise TransientError(f"{got} bytes in {waited:.0f} s")
                waited, got = 0.0, 0

    def _url(self, file: HubFile) -> str:
        return self._client.url(self._pinned.file_path(file.name))


def missing_file(name: str, place: object) -> IncompleteError:
    """Return the error about a file that a listing lacks."""
    return IncompleteError(f"{place}: expected {name}, got none of that name")
