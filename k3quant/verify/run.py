"""`verify`: which checks, in what order, one report."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from k3quant.checkpoint.folder import LocalFolder, Source
from k3quant.checkpoint.header import Header, parse_json
from k3quant.checkpoint.reader import CONFIG_FILE, read_json
from k3quant.errors import K3QuantError
from k3quant.manifest import PROOF_FILE, SUMS_FILE, Manifest, parse_proof, parse_sums
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_layout import ReleasedLayout
from k3quant.progress import SILENT, Progress
from k3quant.report import Finding, Report, finding_of
from k3quant.verify.checks import padded_tensors, spans_of
from k3quant.verify.proven import Proof, ProvenFiles, stamp_of
from k3quant.verify.quant_section import check_released_section
from k3quant.verify.schema import check_schema, read_k3_config
from k3quant.verify.stream import ShardPass, StatsSink, default_jobs, stream_shard
from k3quant.verify.structure import (
    Structure,
    check_against_manifest,
    check_structure,
    wrong_hash,
)


class Level(IntEnum):
    """How deep to look; each level includes the ones before it."""

    HEADERS = 1
    SCHEMA = 2
    HASH = 3
    VALUES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Settings of one run.

    Attributes:
        level: How deep to look.
        manifest: What the files must be; None takes the proof or SHA256SUMS beside them, if any.
        jobs: Shards read at once; None takes the processors.
        stats: Given each tensor's statistics; every file is then read.
        proven: Record of files that need not be read again, None to read everything.
    """

    level: Level = Level.VALUES
    manifest: Manifest | None = None
    jobs: int | None = None
    stats: StatsSink | None = None
    proven: ProvenFiles | None = None


def verify(source: Source, settings: VerifySettings, progress: Progress = SILENT) -> Report:
    """Check a checkpoint and report everything found.

    Args:
        source: Its files.
        settings: What to check.
        progress: Told the bytes read.
    """
    jobs = settings.jobs or default_jobs()
    findings: list[Finding] = []
    config: dict[str, Any] = {}
    try:
        config = read_json(source, CONFIG_FILE)
    except K3QuantError as error:
        findings.append(finding_of(error, subject=CONFIG_FILE, code="config"))
    k3, config_findings = read_k3_config(config) if config else (None, [])
    beside: list[Finding] = []
    manifest = settings.manifest or _beside(source, beside)
    structure = check_structure(source, k3, jobs=jobs, digests=manifest is not None)
    findings += [*structure.findings, *beside]
    if manifest is not None:
        findings += check_against_manifest(source, structure, manifest)
    if settings.level >= Level.SCHEMA:
        findings += config_findings
        findings += _schema(config, k3, structure)
    passes: list[ShardPass] = []
    if settings.level >= Level.HASH:
        passes = _stream(source, structure, k3, manifest, settings, jobs, progress)
        findings += _after_pass(passes, manifest)
        findings += _sidecars(source, structure, manifest, progress)
    summary = _summary(source, structure, manifest, settings, passes)
    return Report(command="verify", findings=tuple(findings), summary=summary)


def _schema(config: Mapping[str, Any], k3: K3Config | None, structure: Structure) -> list[Finding]:
    if structure.predicted:
        assert k3 is not None
        # The files are the table; only the quantization section is left to compare with it.
        return list(check_released_section(config, k3))
    if not config:
        return []
    return check_schema(config, k3, structure.tensors(), lost=structure.lost_tensors())


def _beside(source: Source, findings: list[Finding]) -> Manifest | None:
    """Return the digests that lie beside the files: a conversion's proof, or a SHA256SUMS."""
    for file, parse in ((PROOF_FILE, parse_proof), (SUMS_FILE, parse_sums)):
        info = source.files.get(file)
        if info is None:
            continue
        try:
            return parse(source.read(file, 0, info.size).decode("utf-8", "replace"), file)
        except K3QuantError as error:
            findings.append(finding_of(error, subject=file, code="manifest"))
    return None


def _headers(source: Source, structure: Structure, k3: K3Config | None) -> Mapping[str, Header]:
    """Return the headers of all shards, made from the table where that is all they hold."""
    if not structure.predicted:
        return structure.headers
    assert k3 is not None
    headers: dict[str, Header] = {}
    for shard in ReleasedLayout(k3, k3.packed_experts).shards():
        tensors, metadata = parse_json(shard.header[8:])
        headers[shard.name] = Header(
            file=shard.name,
            file_bytes=source.files[shard.name].size,
            json_bytes=len(shard.header) - 8,
            metadata=metadata,
            tensors=tensors,
        )
    return headers


def _stream(
    source: Source,
    structure: Structure,
    k3: K3Config | None,
    manifest: Manifest | None,
    settings: VerifySettings,
    jobs: int,
    progress: Progress,
) -> list[ShardPass]:
    headers = _headers(source, structure, k3)
    look = settings.level >= Level.VALUES
    files = [f for f in structure.shards if f in source.files and source.files[f].regular]
    # Without a digest to compare and without values to check there is nothing to read for.
    hashed = {f for f in files if manifest and (r := manifest.files.get(f)) and r.sha256}
    files = [file for file in files if file in hashed or (look and file in headers)]
    progress.start("verify", sum(source.files[file].size for file in files), "B")
    padded = padded_tensors(k3) if k3 is not None and look else {}
    memory = _Memory(source, settings, padded)
    # Overlapping or misplaced ranges have no values of their own to check.
    broken = {finding.subject for finding in structure.findings}

    def run(file: str) -> ShardPass:
        progress.note(file)
        sound = look and file in headers and file not in broken
        known = memory.recall(file, values=sound)
        if known is not None:
            progress.advance(source.files[file].size)
            return known
        spans = spans_of(headers[file], padded) if sound else []
        before = memory.stamp(file)
        found = stream_shard(
            source,
            file,
            spans=spans,
            hashed=file in hashed or before is not None,
            advance=progress.advance,
            stats=settings.stats,
        )
        memory.keep(found, values=sound, before=before)
        return found

    largest_first = sorted(files, key=lambda file: -source.files[file].size)
    with ThreadPoolExecutor(jobs) as pool:
        return sorted(pool.map(run, largest_first), key=lambda shard: shard.file)


class _Memory:
    """What the record of proven files knows of a local folder's shards."""

    def __init__(self, source: Source, settings: VerifySettings, padded: Mapping[str, int]) -> None:
        local = isinstance(source, LocalFolder) and settings.stats is None
        self._proven = settings.proven if local else None
        self._root = source.root if isinstance(source, LocalFolder) else Path()
        # Values were checked by the shard's own header and by which tensors are padded.
        self._rules = hashlib.sha256(repr(sorted(padded.items())).encode()).hexdigest()

    def stamp(self, file: str) -> tuple[int, ...] | None:
        return None if self._proven is None else stamp_of(self._root / file)

    def recall(self, file: str, *, values: bool) -> ShardPass | None:
        if self._proven is None:
            return None
        proof = self._proven.look_up(self._root / file)
        if proof is None or (values and proof.values != self._rules):
            return None
        return ShardPass(file=file, sha256=proof.sha256, findings=(), remembered=True)

    def keep(self, found: ShardPass, *, values: bool, before: tuple[int, ...] | None) -> None:
        if self._proven is not None and found.sha256 is not None and not found.findings:
            proof = Proof(sha256=found.sha256, values=self._rules if values else None)
            self._proven.remember(self._root / found.file, proof, before)


def _after_pass(passes: list[ShardPass], manifest: Manifest | None) -> list[Finding]:
    findings: list[Finding] = []
    for shard in passes:
        findings += shard.findings
        record = manifest.files.get(shard.file) if manifest else None
        if record and record.sha256 and shard.sha256 and shard.sha256 != record.sha256:
            findings.append(wrong_hash(shard.file, record.sha256, shard.sha256))
    return findings


def _sidecars(
    source: Source, structure: Structure, manifest: Manifest | None, progress: Progress
) -> list[Finding]:
    findings: list[Finding] = []
    for file, record in sorted(manifest.files.items()) if manifest else []:
        known = file in source.files and file not in structure.shards
        if known and record.sha256 and source.files[file].regular:
            shard = stream_shard(source, file, spans=[], hashed=True, advance=progress.advance)
            findings += shard.findings
            if shard.sha256 and shard.sha256 != record.sha256:
                findings.append(wrong_hash(file, record.sha256, shard.sha256))
    return findings


def _summary(
    source: Source,
    structure: Structure,
    manifest: Manifest | None,
    settings: VerifySettings,
    passes: list[ShardPass],
) -> dict[str, Any]:
    present = [file for file in structure.shards if file in source.files]
    return {
        "path": source.label,
        "level": settings.level.name.lower(),
        "manifest": manifest.name if manifest else None,
        "shards": len(structure.shards),
        "shards_present": len(present),
        "tensors": structure.num_tensors,
        "file_bytes": sum(source.files[file].size for file in present),
        "layout": "released" if structure.predicted else "other",
        "hashed": sum(shard.sha256 is not None for shard in passes),
        "remembered": sum(shard.remembered for shard in passes),
    }
