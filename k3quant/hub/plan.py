"""What a download will do, known before its first byte of payload."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3quant.checkpoint.output_file import free_bytes, preflight_space
from k3quant.errors import UsageError
from k3quant.hub.client import HubClient
from k3quant.hub.content import Content
from k3quant.hub.cut_plan import plan_cut_parts
from k3quant.hub.digest import Expected
from k3quant.hub.index_bytes import IndexBytes
from k3quant.hub.listing import HubFile, Listing, list_files
from k3quant.hub.partial import Partial
from k3quant.hub.parts import Parts, plan_file_parts
from k3quant.hub.path_lengths import too_long_paths
from k3quant.hub.ranges import RangeReader
from k3quant.hub.rate_limit import RateLimit
from k3quant.hub.record import DownloadRecord, ListedFile, load_record, refuse_other
from k3quant.hub.reference import Reference
from k3quant.hub.settings import DownloadSettings


@dataclass(frozen=True, kw_only=True)
class DownloadPlan:
    """A planned download.

    Attributes:
        listing: The repository at its commit.
        out: The folder.
        reader: Reads the repository's files.
        contents: Files to fetch, in the order to begin them.
        documents: Files that are written from memory after all others, in this order.
        wanted: All files to have, by name.
        whole: All files of the checkpoint; empty where nobody had to know, or for a cut.
        strays: Files of the repository that hold weights but belong to no index.
        expected: What the bytes of each wanted file must be.
        present: Wanted files that lie under their names with the right size.
        partial: Bytes that have arrived of files that were begun, by name.
        record: The folder's record, None where there is none.
    """

    listing: Listing
    out: Path
    reader: RangeReader
    contents: tuple[Content, ...]
    documents: dict[str, bytes]
    wanted: dict[str, ListedFile]
    whole: dict[str, ListedFile]
    strays: tuple[HubFile, ...]
    expected: dict[str, Expected]
    present: frozenset[str]
    partial: dict[str, int]
    record: DownloadRecord | None

    @property
    def total_bytes(self) -> int:
        """Bytes of all wanted files."""
        return sum(file.bytes for file in self.wanted.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived yet, as far as sizes tell."""
        absent = self.wanted.keys() - self.present
        return sum(self.wanted[name].bytes - self.partial.get(name, 0) for name in absent)

    def check_space(self, *, free: Callable[[Path], int] = free_bytes) -> None:
        """Refuse to start what the disk cannot hold.

        Raises:
            ResourceError: Less is free than is missing.
        """
        hint = "only missing bytes are counted; `--include` or `--layers` needs less"
        preflight_space(self.out, self.missing_bytes, free=free, hint=hint)

    def summary(self) -> dict[str, Any]:
        """Return the plan's numbers, ready for JSON."""
        return {
            "repository": self.listing.pinned.repository,
            "revision": self.listing.reference.revision,
            "commit": self.listing.pinned.revision,
            "out": str(self.out),
            "files": len(self.wanted),
            "bytes": self.total_bytes,
            "files_present": len(self.present),
            "missing_bytes": self.missing_bytes,
            "free_bytes": free_bytes(self.out),
            "strays": len(self.strays),
            "stray_bytes": sum(file.size for file in self.strays),
        }


def plan_download(
    reference: Reference, out: Path, settings: DownloadSettings, *, client: HubClient | None = None
) -> DownloadPlan:
    """Resolve a reference and plan its download; writes nothing.

    Args:
        reference: The repository and its revision.
        out: The folder to write.
        settings: What to have.
        client: The endpoint; None takes that of the settings.

    Raises:
        UsageError: There is no such repository, revision, file or layer, access is denied, or a
            path is too long for the system.
        IncompleteError: The repository lacks shards or its index.
        RefusedError: The folder belongs to another repository, commit or cut.
        HashError: The manifest and the Hub name different digests.
        StructureError: The index, a header or the folder's record is malformed.
        SchemaError: The config is none that can be cut.
        ResourceError: The server failed for as long as the policy allows.
    """
    client = client or settings.client()
    listing = list_files(client, reference)
    record = load_record(out)
    if record is not None:
        refuse_other(
            out,
            record,
            repository=listing.pinned.repository,
            commit=listing.pinned.revision,
            cut=settings.cut_label,
            accept_new=settings.accept_new_commit,
        )
    reader = RangeReader(client, listing, limit=RateLimit(settings.rate_limit, client.stop))
    index = IndexBytes(reader, listing, out)
    planned = plan_cut_parts if settings.is_cut else plan_file_parts
    parts = planned(client, listing, reader, index, settings)
    _refuse_long_paths(out, parts.wanted)
    present, partial = _what_is_there(listing, out, parts, settings)
    return DownloadPlan(
        listing=listing,
        out=out,
        reader=reader,
        present=present,
        partial=partial,
        record=record,
        contents=parts.contents,
        documents=parts.documents,
        wanted=parts.wanted,
        whole=parts.whole,
        strays=parts.strays,
        expected=parts.expected,
    )


def _refuse_long_paths(out: Path, names: Iterable[str]) -> None:
    if os.name != "nt":
        return
    for sentence in too_long_paths(str(out.absolute()), names):
        raise UsageError(sentence, hint="name a folder with a shorter path, or prefix it `\\\\?\\`")


def _what_is_there(
    listing: Listing, out: Path, parts: Parts, settings: DownloadSettings
) -> tuple[frozenset[str], dict[str, int]]:
    present: set[str] = set()
    for name, file in parts.wanted.items():
        with suppress(OSError):
            if (out / name).is_file() and (out / name).stat().st_size == file.bytes:
                present.add(name)
    partial: dict[str, int] = {}
    commit, piece_bytes = listing.pinned.revision, settings.piece_bytes
    for content in parts.contents:
        if content.name in present:
            continue
        begun = Partial(out / content.name, content, commit=commit, piece_bytes=piece_bytes)
        if begun.done_bytes:
            partial[content.name] = begun.done_bytes
    return frozenset(present), partial
