"""Headers and index of a whole checkpoint, checked shard by shard in parallel.

A checkpoint in the released layout whose headers and index equal the bytes predicted from its
config is proven without parsing; anything else is parsed and checked rule by rule.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from k3quant.checkpoint.folder import Source, prefetch_headers
from k3quant.checkpoint.header import LENGTH_BYTES, Header, HeaderScan, scan_header
from k3quant.checkpoint.index import INDEX_FILE, Index, parse_index
from k3quant.checkpoint.join import extra_files, join_index
from k3quant.checkpoint.reader import not_regular, top_level_shards
from k3quant.errors import K3QuantError
from k3quant.manifest import Manifest
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_layout import PredictedShard, ReleasedLayout
from k3quant.models.k3_tensors import num_shards
from k3quant.report import FaultClass, Finding, Severity, finding_of
from k3quant.schemes.storage import Stored

_COMPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What the headers and the index say.

    Attributes:
        index: The index, None where there is none or it is malformed.
        headers: Header of each shard that could be parsed, strays at the top level included.
        shards: Files that belong to the checkpoint.
        header_sha256: Digest of each shard's header JSON.
        predicted: Whether all files equal the released layout of the config, byte for byte; then
            `headers` is empty, because the table says it all.
        num_tensors: Tensors of the checkpoint's own shards.
        findings: Every fault found.
    """

    index: Index | None
    headers: Mapping[str, Header]
    shards: tuple[str, ...]
    header_sha256: Mapping[str, str]
    predicted: bool
    num_tensors: int
    findings: tuple[Finding, ...]

    def tensors(self) -> dict[str, Stored]:
        """Return dtype and shape of every tensor of the checkpoint's own shards."""
        return {
            name: (entry.dtype, entry.shape)
            for file in self.shards
            if file in self.headers
            for name, entry in self.headers[file].tensors.items()
        }

    def lost_tensors(self) -> set[str]:
        """Return the indexed tensors whose file is missing or has no readable header."""
        if self.index is None:
            return set()
        return {name for name, file in self.index.weight_map.items() if file not in self.headers}


def check_structure(source: Source, k3: K3Config | None, *, jobs: int, digests: bool) -> Structure:
    """Check every header and the index.

    Args:
        source: The checkpoint's files.
        k3: The typed config where there is one; it allows the fast proof.
        jobs: Headers read at once.
        digests: Whether the headers' digests are needed, for a manifest.
    """
    prefetch_headers(source, top_level_shards(source))
    if k3 is not None:
        proven = _prove_by_prediction(source, k3, jobs, digests)
        if proven is not None:
            return proven
    findings: list[Finding] = []
    index = _read_index(source, findings)
    shards = top_level_shards(source)
    if index is not None:
        shards = sorted(set(index.weight_map.values()))
    present = [file for file in {*shards, *top_level_shards(source)} if file in source.files]
    scans = dict(zip(present, _scan_all(source, present, jobs), strict=True))
    for file in sorted(scans):
        severity = Severity.ERROR if file in shards else Severity.WARNING
        findings += [_as(finding, severity) for finding in scans[file].findings]
    headers = {file: scan.header for file, scan in scans.items() if scan.header is not None}
    if index is not None:
        findings += join_index(index, source.files, headers)
        findings += extra_files(index, source.files)
        findings += _strays(source, index, headers)
    hashed = {f: hashlib.sha256(s.raw).hexdigest() for f, s in scans.items() if s.raw and digests}
    return Structure(
        index=index,
        headers=headers,
        shards=tuple(shards),
        header_sha256=hashed,
        predicted=False,
        num_tensors=sum(len(headers[file].tensors) for file in shards if file in headers),
        findings=tuple(findings),
    )


def check_against_manifest(
    source: Source, structure: Structure, manifest: Manifest
) -> list[Finding]:
    """Compare sizes and header digests with a manifest; payload digests come later."""
    findings: list[Finding] = []
    for file, record in sorted(manifest.files.items()):
        info = source.files.get(file)
        if info is None:
            if file not in structure.shards:  # else the index's join says it
                findings.append(_missing(file, record.bytes))
        elif record.bytes is not None and info.size != record.bytes and info.regular:
            findings.append(_wrong_size(file, record.bytes, info.size))
        elif record.sha256 and info.sha256 and info.sha256 != record.sha256:
            findings.append(wrong_hash(file, record.sha256, info.sha256))
        elif record.header_sha256 is not None and file in structure.header_sha256:
            got = structure.header_sha256[file]
            if got != record.header_sha256:
                message = (
                    f"{file}: expected header sha256 {record.header_sha256}, got {got} "
                    f"({manifest.name})"
                )
                findings.append(
                    Finding(
                        code="header-hash",
                        fault=FaultClass.HASH,
                        subject=file,
                        message=message,
                        expected=record.header_sha256,
                        got=got,
                    )
                )
    return findings


def _prove_by_prediction(source: Source, k3: K3Config, jobs: int, hashed: bool) -> Structure | None:
    layout = ReleasedLayout(k3, k3.packed_experts)
    digests: dict[str, str] = {}

    def equal(number: int) -> PredictedShard | None:
        shard = layout.shard(number)
        info = source.files.get(shard.name)
        if info is None or info.size != shard.file_bytes or not info.regular:
            return None
        if source.read(shard.name, 0, len(shard.header)) != shard.header:
            return None
        if hashed:
            digests[shard.name] = hashlib.sha256(shard.header[LENGTH_BYTES:]).hexdigest()
        return shard

    if INDEX_FILE not in source.files or equal(1) is None:
        return None
    proven: list[PredictedShard] = []
    with ThreadPoolExecutor(jobs) as pool:
        for shard in pool.map(equal, range(1, num_shards(k3) + 1)):
            if shard is None:
                return None
            proven.append(shard)
    if len(top_level_shards(source)) != len(proven):
        return None
    raw = source.read(INDEX_FILE, 0, source.files[INDEX_FILE].size)
    if not _consists_of(raw, layout.index_pieces()):
        return None
    index = Index(weight_map={}, total_size=None)
    return Structure(
        index=index,
        headers={},
        shards=tuple(shard.name for shard in proven),
        header_sha256=digests,
        predicted=True,
        num_tensors=sum(shard.num_tensors for shard in proven),
        findings=(),
    )


def _consists_of(raw: bytes, pieces: Iterator[bytes]) -> bool:
    position = 0
    for piece in pieces:
        if not raw.startswith(piece, position):
            return False
        position += len(piece)
    return position == len(raw)


def _read_index(source: Source, findings: list[Finding]) -> Index | None:
    if INDEX_FILE in source.files:
        try:
            return parse_index(source.read(INDEX_FILE, 0, source.files[INDEX_FILE].size))
        except K3QuantError as error:
            findings.append(finding_of(error, subject=INDEX_FILE, code="index"))
            return None
    shards = top_level_shards(source)
    if len(shards) != 1:
        got = f"{len(shards)} shards without an index" if shards else "no shards"
        findings.append(
            Finding(
                code="no-index" if shards else "no-shards",
                fault=FaultClass.INCOMPLETE,
                subject=INDEX_FILE,
                message=f"{source.label}: index missing: expected {INDEX_FILE}, got {got}",
                hint="`k3quant repack --rebuild-index` writes one from the shards' headers"
                if shards
                else "`k3quant download` fetches a checkpoint",
            )
        )
    return None


def _scan_all(source: Source, files: list[str], jobs: int) -> list[HeaderScan]:
    def scan(file: str) -> HeaderScan:
        info = source.files[file]
        if not info.regular:
            return HeaderScan(None, (not_regular(file),))

        def fetch(offset: int, length: int) -> bytes:
            return source.read(file, offset, length)

        try:
            return scan_header(fetch, file=file, file_bytes=info.size)
        except K3QuantError as error:
            return HeaderScan(None, (finding_of(error, subject=file, code="read"),))

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(scan, files))


def _strays(source: Source, index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    """Find unindexed files that repeat an indexed tensor with other bytes."""
    named = set(index.weight_map.values())
    findings: list[Finding] = []
    for file in sorted(headers.keys() - named):
        repeated = [name for name in headers[file].tensors if name in index.weight_map]
        other = [
            n for n in repeated if not _same_bytes(source, headers, index.weight_map[n], file, n)
        ]
        if other:
            message = (
                f"{file}: expected no file beside the index that repeats its tensors, got "
                f"{len(other)} of {len(repeated)} with other bytes, such as {other[0]}"
            )
            findings.append(
                Finding(
                    code="stray-file",
                    fault=FaultClass.STRUCTURE,
                    subject=file,
                    message=message,
                    got=len(other),
                    hint="a loader that takes every *.safetensors may read the wrong one; move it",
                )
            )
    return findings


def _same_bytes(
    source: Source, headers: Mapping[str, Header], indexed: str, stray: str, name: str
) -> bool:
    if indexed not in headers or name not in headers[indexed].tensors:
        return True  # said elsewhere
    a, b = headers[indexed].tensors[name], headers[stray].tensors[name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    start_a, start_b = headers[indexed].data_start + a.begin, headers[stray].data_start + b.begin
    for offset in range(0, a.end - a.begin, _COMPARE_BYTES):
        length = min(_COMPARE_BYTES, a.end - a.begin - offset)
        ours = source.read(indexed, start_a + offset, length)
        if ours != source.read(stray, start_b + offset, length):
            return False
    return True


def _as(finding: Finding, severity: Severity) -> Finding:
    return finding if severity is Severity.ERROR else replace(finding, severity=severity)


def wrong_hash(file: str, expected: str, got: str) -> Finding:
    """Return the finding about a file whose digest is not the recorded one."""
    return Finding(
        code="hash",
        fault=FaultClass.HASH,
        subject=file,
        message=f"{file}: expected sha256 {expected}, got {got}",
        expected=expected,
        got=got,
        hint="the bytes are not the recorded ones; fetch this file again",
    )


def _missing(file: str, size: int | None) -> Finding:
    return Finding(
        code="missing-file",
        fault=FaultClass.INCOMPLETE,
        subject=file,
        message=f"{file}: missing: expected {size if size is not None else 'some'} bytes, got "
        "no such file",
        expected=size,
    )


def _wrong_size(file: str, expected: int, got: int) -> Finding:
    short = got < expected
    by = f"{'short' if short else 'long'} by {abs(expected - got)} bytes"
    return Finding(
        code="short-file" if short else "long-file",
        fault=FaultClass.INCOMPLETE if short else FaultClass.HASH,
        subject=file,
        message=f"{file}: {by}: expected {expected} (manifest), got {got}",
        expected=expected,
        got=got,
    )
