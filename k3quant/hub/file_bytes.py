"""A small file of a repository in memory, proved by the digest that the Hub lists for it."""

from k3quant.errors import HashError
from k3quant.hub.digest import Expected, Mismatch, judge_bytes
from k3quant.hub.listing import HubFile
from k3quant.hub.ranges import RangeReader

_ATTEMPTS = 2


def expected_of_listing(file: HubFile) -> Expected:
    """Return what a file's bytes must be by the Hub alone."""
    return Expected(size=file.size, sha256=file.sha256, blob_id=file.blob_id)


def read_proved(reader: RangeReader, file: HubFile) -> bytes:
    """Read a whole file; bytes that are not what the Hub lists are asked for once more.

    Raises:
        HashError: They are wrong again.
        IncompleteError: The file is gone.
        RefusedError: The server's file is not the listing's.
        ResourceError: The server failed for as long as the policy allows.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        raw = b"".join(reader.stream(file, 0, file.size, whole_allowed=True))
        verdict = judge_bytes(raw, expected_of_listing(file))
        if not isinstance(verdict, Mismatch):
            break
        if attempt == _ATTEMPTS:
            raise HashError(
                f"{file.name}: expected {verdict.expected}, got {verdict.got}, {attempt} times",
                hint="the server, or something on the way, changes bytes; try another endpoint",
            )
    return raw
