"""A cut of layers and experts made on the way: only the ranges that it needs are fetched.

The cut itself is `repack`'s. A file that keeps all tensors of one shard is proved by that shard's
digest, computed with the shard's own head in place of the new one; for a part of a shard there is
no digest anywhere to compare with.
"""

import hashlib
import json
from collections.abc import Generator

from k3quant.checkpoint.index import INDEX_FILE, Index
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.checkpoint.other_index import OtherIndex
from k3quant.checkpoint.reader import CONFIG_FILE, read_json
from k3quant.errors import IncompleteError
from k3quant.hub.client import HubClient
from k3quant.hub.content import Content, WholeFile
from k3quant.hub.digest import Expected, OtherHead
from k3quant.hub.index_bytes import IndexBytes
from k3quant.hub.listing import Listing
from k3quant.hub.parts import Parts, expected_of
from k3quant.hub.ranges import RangeReader
from k3quant.hub.record import ListedFile, listed
from k3quant.hub.selection import is_sidecar
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.source import HubSource
from k3quant.repack.cut import cut_tensors, plan_cut
from k3quant.repack.plan import RepackPlan, plan_repack
from k3quant.repack.ranges import PlannedHeader
from k3quant.repack.settings import RepackSettings


class CutFile:
    """A file made of a new head and ranges of the repository's files."""

    def __init__(
        self, reader: RangeReader, listing: Listing, name: str, planned: PlannedHeader
    ) -> None:
        self._reader = reader
        self._listing = listing
        self._head = planned.header
        self._ranges = planned.ranges
        self.name = name
        self.size = max((r.target + r.length for r in planned.ranges), default=len(self._head))
        identity = [(listing.files[r.file].etag, *r) for r in planned.ranges]
        self.etag = hashlib.sha256(self._head + json.dumps(identity).encode()).hexdigest()
        self.may_be_shared = True

    def stream(self, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a range."""
        if begin < len(self._head):
            yield self._head[begin:end]
        for span in self._ranges:
            first = max(begin, span.target)
            last = min(end, span.target + span.length)
            if first < last:
                shift = span.offset - span.target
                file = self._listing.files[span.file]
                yield from self._reader.stream(file, first + shift, last + shift)


def plan_cut_parts(
    client: HubClient,
    listing: Listing,
    reader: RangeReader,
    index: IndexBytes,
    settings: DownloadSettings,
) -> Parts:
    """Plan the files of a cut.

    Args:
        client: The endpoint.
        listing: The repository at its commit.
        reader: Reads its files.
        index: Its index.
        settings: The layers and experts.

    Raises:
        UsageError: The layers or experts are not the model's, or cannot be cut.
        IncompleteError: The repository lacks its index, its config or a shard.
        StructureError: The index or a header is malformed.
        SchemaError: The config is none that can be cut.
        ResourceError: The server failed for as long as the policy allows.
    """
    source = HubSource(listing, client=client)
    narrow, shards = _narrow(source, index.parsed(), settings)
    source.prefetch_headers(shards, jobs=settings.jobs)
    repack = RepackSettings(layers=settings.layers, experts=settings.experts)
    plan = plan_repack(narrow, repack)
    sidecars = [listing.files[n] for n in plan.sidecars.copied if is_sidecar(n)]
    wanted = listed(sidecars)
    expected = {file.name: expected_of(file, settings) for file in sidecars}
    contents: list[Content] = [WholeFile(reader, file) for file in sidecars]
    for shard in plan.shards.files:
        planned = plan.header(shard)
        file = CutFile(reader, listing, shard.file, planned)
        contents.append(file)
        expected[file.name] = _expected(plan, listing, planned, file.size)
        wanted[file.name] = ListedFile(file.size, cut_id=file.etag)
    documents = dict(plan.rewritten()) | dict(plan.index_files())
    for name, content in documents.items():
        digest = hashlib.sha256(content).hexdigest()
        wanted[name] = ListedFile(len(content), sha256=digest)
        expected[name] = Expected(size=len(content), sha256=digest)
    return Parts(
        contents=tuple(contents),
        documents=documents,
        wanted=wanted,
        whole={},
        strays=(),
        expected=expected,
    )


def _narrow(
    source: HubSource, index: Index | None, settings: DownloadSettings
) -> tuple[OtherIndex, list[str]]:
    """Return a repository with no other shards than a cut needs, and those shards.

    No other header is read then.
    """
    if index is None:
        raise IncompleteError(
            f"{source.label}: index missing: expected {INDEX_FILE} to tell what lies where",
            hint="fetch the whole checkpoint and cut it with `k3quant repack`",
        )
    config = read_json(source, CONFIG_FILE)
    cut = plan_cut(config, layers=settings.layers, experts=settings.experts)
    modules = {tensor.source.module for tensor in cut_tensors(cut)}
    # By module and not by name, so that experts in another spelling than the table's count.
    shards = {file for name, file in index.weight_map.items() if name.rpartition(".")[0] in modules}
    kept = {name: file for name, file in index.weight_map.items() if file in shards}
    files = {
        name: info
        for name, info in source.files.items()
        if name in shards or not name.endswith(SHARD_SUFFIX)
    }
    document = json.dumps({"metadata": {}, "weight_map": kept}).encode()
    return OtherIndex(source, document, files), sorted(shards)


def _expected(plan: RepackPlan, listing: Listing, planned: PlannedHeader, size: int) -> Expected:
    """Return what is known of a file: its source's digest, if it keeps the source's whole data."""
    if len(planned.ranges) != 1:
        return Expected(size=size)
    span = planned.ranges[0]
    file, start = listing.files[span.file], plan.checkpoint.headers[span.file].data_start
    if file.sha256 is None or (span.offset, span.length) != (start, file.size - start):
        return Expected(size=size)
    head = plan.checkpoint.source.read(span.file, 0, start)
    if head == planned.header:
        return Expected(size=size, sha256=file.sha256)
    other = OtherHead(head=head, replaced=len(planned.header), sha256=file.sha256)
    return Expected(size=size, other_head=other)
