"""What is to be had of a repository, before anybody looks at the folder."""

import hashlib
from dataclasses import dataclass

from k3quant.checkpoint.reader import top_level_shards
from k3quant.errors import HashError
from k3quant.hub.client import HubClient
from k3quant.hub.content import Content, WholeFile
from k3quant.hub.digest import Expected
from k3quant.hub.index_bytes import IndexBytes
from k3quant.hub.listing import HubFile, Listing
from k3quant.hub.ranges import RangeReader
from k3quant.hub.record import ListedFile, listed
from k3quant.hub.selection import HEADER_SUFFIX, HEADERS, select_files
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.source import HubSource


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is to be had, before anybody looked at the folder; fields as in `DownloadPlan`."""

    contents: tuple[Content, ...]
    documents: dict[str, bytes]
    wanted: dict[str, ListedFile]
    whole: dict[str, ListedFile]
    strays: tuple[HubFile, ...]
    expected: dict[str, Expected]


def expected_of(file: HubFile, settings: DownloadSettings) -> Expected:
    """Return what a file's bytes must be by the Hub and by the manifest.

    Raises:
        HashError: The two name different digests or sizes.
    """
    known = settings.manifest.files.get(file.name) if settings.manifest else None
    if known is None:
        return Expected(size=file.size, sha256=file.sha256, blob_id=file.blob_id)
    for what, manifest, hub in (
        ("bytes", known.bytes, file.size),
        ("sha256", known.sha256, file.sha256),
    ):
        if manifest is not None and hub is not None and manifest != hub:
            raise HashError(
                f"{file.name}: expected {what} {manifest} as in the manifest, got {hub} in the "
                "repository's listing",
                hint="the manifest is of another revision, or the repository was changed",
            )
    return Expected(size=file.size, sha256=file.sha256 or known.sha256, blob_id=file.blob_id)


def plan_file_parts(
    client: HubClient,
    listing: Listing,
    reader: RangeReader,
    index: IndexBytes,
    settings: DownloadSettings,
) -> Parts:
    """Plan files as the repository has them.

    Args:
        client: The endpoint.
        listing: The repository at its commit.
        reader: Reads its files.
        index: Its index.
        settings: What to have.

    Raises:
        UsageError: There is no such file.
        IncompleteError: The repository lacks shards or its index.
        HashError: The manifest and the Hub name different digests.
        StructureError: The index is malformed.
        ResourceError: The server failed for as long as the policy allows.
    """
    patterns = [p for p in settings.include if p != HEADERS]
    selection = select_files(listing, index.parsed, patterns)
    wanted = () if settings.include and not patterns else selection.wanted
    documents: dict[str, bytes] = {}
    if HEADERS in settings.include:
        documents = _headers(client, listing, index, settings)
    if index.fetched is not None and index.name in {file.name for file in wanted}:
        documents[index.name] = index.fetched
    expected = {file.name: expected_of(file, settings) for file in wanted}
    listed_files = listed(wanted)
    for name in documents.keys() - expected.keys():
        digest = hashlib.sha256(documents[name]).hexdigest()
        expected[name] = Expected(size=len(documents[name]), sha256=digest)
        listed_files[name] = ListedFile(len(documents[name]), sha256=digest)
    return Parts(
        contents=tuple(WholeFile(reader, f) for f in wanted if f.name not in documents),
        documents=documents,
        wanted=listed_files,
        whole=listed(selection.whole),
        strays=selection.strays,
        expected=expected,
    )


def _headers(
    client: HubClient, listing: Listing, index: IndexBytes, settings: DownloadSettings
) -> dict[str, bytes]:
    source = HubSource(listing, client=client)
    parsed = index.parsed()
    shards = sorted(set(parsed.weight_map.values()) if parsed else top_level_shards(source))
    source.prefetch_headers(shards, jobs=settings.jobs)
    return {f"{shard}{HEADER_SUFFIX}": source.read_header(shard) for shard in shards}
