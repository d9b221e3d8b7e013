"""A repository on the Hub as a source of files, read by ranges.

The first bytes of a shard are fetched with room for a header as large as Kimi-K3's (0.82 MB), so
that a header costs one request, and two where it is longer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from k3quant.checkpoint.folder import FileInfo
from k3quant.checkpoint.header import LENGTH_BYTES, MAX_HEADER_BYTES
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.errors import IncompleteError
from k3quant.hub.client import HubClient
from k3quant.hub.file_bytes import read_proved
from k3quant.hub.listing import HubFile, Listing, list_files
from k3quant.hub.ranges import RangeReader, missing_file
from k3quant.hub.reference import Reference, parse_reference

HEAD_BYTES = 1 << 20
_KEPT_BYTES = 128 << 20  # of headers; all of Kimi-K3's take 76 MB


class HubSource:
    """The files of a repository at one commit, for reading from any number of threads.

    Args:
        reference: The repository and its revision, resolved to a commit now; or its listing.
        client: The endpoint to ask; None takes the one of the environment.

    Raises:
        UsageError: There is no such repository or revision, or access is denied.
        ResourceError: The server failed for as long as the policy allows.
    """

    def __init__(
        self, reference: Reference | Listing | str, *, client: HubClient | None = None
    ) -> None:
        self._client = client or HubClient()
        if isinstance(reference, str):
            reference = parse_reference(reference)
        if isinstance(reference, Reference):
            reference = list_files(self._client, reference)
        self.listing: Listing = reference
        self._ranges = RangeReader(self._client, self.listing)
        self.reference = self.listing.pinned
        self._files = {
            name: FileInfo(size=f.size, sha256=f.sha256) for name, f in self.listing.files.items()
        }
        self._lock = Lock()
        self._heads: OrderedDict[str, bytes] = OrderedDict()
        self._heads_bytes = 0

    @property
    def label(self) -> str:
        """The repository at its commit."""
        return str(self.listing.pinned)

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """Every file of the repository."""
        return self._files

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range, fewer bytes only where the file ends.

        A whole file that is no shard is compared with the digest that the Hub lists.

        Raises:
            IncompleteError: The file does not exist.
            HashError: A whole file is not what the Hub lists.
            RefusedError: The server's file is not the listing's.
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
        """
        found = self._find(file)
        end = min(offset + length, found.size)
        if offset >= end:
            return b""
        if not file.endswith(SHARD_SUFFIX) and (offset, end) == (0, found.size):
            return read_proved(self._ranges, found)
        if offset >= HEAD_BYTES or not file.endswith(SHARD_SUFFIX):
            return self._ranges.read(found, offset, end)
        head = self._head(found)
        rest = b""
        if end > len(head):
            rest = self._ranges.read(found, max(offset, len(head)), end)
        return head[offset:end] + rest

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a range.

        Raises:
            IncompleteError: The file does not exist or ends inside the range.
            RefusedError: The server's file is not the listing's.
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
        """
        found = self._find(file)
        end = offset + len(buffer)
        if end > found.size:
            raise IncompleteError(
                f"{file}: expected {len(buffer)} bytes at offset {offset}, got "
                f"{max(found.size - offset, 0)} (the file ends there)"
            )
        done = 0
        for chunk in self._ranges.stream(found, offset, end):
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)

    def prefetch_headers(self, files: Iterable[str], *, jobs: int = 8) -> None:
        """Fetch the headers of shards side by side, so that reading them costs nothing.

        Args:
            files: The shards.
            jobs: Connections.

        Raises:
            IncompleteError: A file does not exist.
            RefusedError: The server's file is not the listing's.
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
        """
        with ThreadPoolExecutor(jobs, thread_name_prefix="headers") as pool:
            for _ in pool.map(self.read_header, files):
                pass

    def read_header(self, file: str) -> bytes:
        """Read a shard's length bytes and header; what they say is not checked.

        Raises:
            IncompleteError: The file does not exist.
            RefusedError: The server's file is not the listing's.
            ResourceError: The server failed for as long as the policy allows, or ignores ranges.
        """
        length = int.from_bytes(self.read(file, 0, LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            return self.read(file, 0, LENGTH_BYTES)
        return self.read(file, 0, LENGTH_BYTES + length)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _find(self, file: str) -> HubFile:
        found = self.listing.files.get(file)
        if found is None:
            raise missing_file(file, self.label)
        return found

    def _head(self, file: HubFile) -> bytes:
        with self._lock:
            kept = self._heads.get(file.name)
            if kept is not None:
                self._heads.move_to_end(file.name)
                return kept
        head = _until_data(self._ranges.read(file, 0, min(HEAD_BYTES, file.size)))
        with self._lock:
            if file.name not in self._heads:
                self._heads[file.name] = head
                self._heads_bytes += len(head)
            while self._heads_bytes > _KEPT_BYTES:
                _, oldest = self._heads.popitem(last=False)
                self._heads_bytes -= len(oldest)
        return head


def _until_data(head: bytes) -> bytes:
    """Drop what follows a header that lies in these bytes as a whole."""
    end = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
    return head[:end]
