"""`download --offline`: whether a folder is whole, told from what lies in it and nothing else.

A folder with a record is compared with it. One without is compared with its index, so that what
another client left behind is judged too; there sizes are known only from the shards' headers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Event

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.header import scan_header
from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.checkpoint.reader import CONFIG_FILE, read_index
from k3quant.errors import IncompleteError, UsageError
from k3quant.hub.digest import Expected, Mismatch
from k3quant.hub.existing import foreign_partials, hash_files
from k3quant.hub.outcome import mismatch_finding
from k3quant.hub.record import COMPLETE, PARTIAL, SUBSET, DownloadRecord, ListedFile, load_record
from k3quant.hub.selection import GROUPS, HEADER_SUFFIX, HEADERS
from k3quant.hub.settings import DownloadSettings
from k3quant.progress import SILENT, Progress
from k3quant.report import FaultClass, Finding, Report, Severity


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A file to look for; the size is None where nothing tells it."""

    name: str
    size: int | None
    listed: ListedFile | None


def check_offline(out: Path, settings: DownloadSettings, progress: Progress = SILENT) -> Report:
    """Check a folder against its record, or its index, without any network.

    Args:
        out: The folder.
        settings: `include` says what to look for, nothing means the whole checkpoint;
            `verify_only` hashes too; `manifest` adds digests.
        progress: Told the bytes read.

    Returns:
        A report that is in order only where everything asked for is there.

    Raises:
        IncompleteError: There is no folder, or it holds no index and several shards, or none.
        UsageError: `include` names what the folder's record does not know.
        StructureError: The record or the index is malformed.
        ResourceError: The system refused a read.
    """
    folder = LocalFolder(out)
    record = load_record(out)
    wanted = _by_record(folder, record, settings) if record else _by_index(folder, settings)
    findings = list(_absent(folder, wanted))
    if record is None:
        findings += _bad_headers(folder, wanted)
    if settings.verify_only:
        findings += _bad_digests(folder, wanted, record, settings, progress)
    faults = [f for f in findings if f.severity is Severity.ERROR]
    summary = {
        "out": str(out),
        "state": _state(record, wanted, whole=not faults),
        "commit": record.commit if record else None,
        "files": len(wanted),
        "missing_files": sum(f.code == "missing-file" for f in faults),
        "partial_files": len(_partials(folder)),
        "hashed": settings.verify_only,
    }
    return Report(command="download", findings=tuple(findings), summary=summary)


def _by_record(
    folder: LocalFolder, record: DownloadRecord, settings: DownloadSettings
) -> list[_Wanted]:
    known = record.whole | record.wanted
    if settings.include:
        names = {name for pattern in settings.include for name in _matches(pattern, record, known)}
        return [_Wanted(name, known[name].bytes, known[name]) for name in sorted(names)]
    if record.cut == settings.cut_label and (record.cut or record.whole):
        files = record.wanted if record.cut else record.whole
        return [_Wanted(name, file.bytes, file) for name, file in sorted(files.items())]
    if INDEX_FILE in folder.files and not record.cut:
        # The index tells which shards a subset lacks, where nobody asked the Hub for the rest.
        named = _by_index(folder, settings)
        if any(file.name not in folder.files for file in named):
            return named
    what = record.cut or ", ".join(record.include) or "the whole model"
    raise IncompleteError(
        f"{folder.label}: expected {settings.cut_label or 'the whole checkpoint'}, got a subset "
        f"({what} of {record.repository})",
        hint="name the same `--include`, `--layers` and `--experts` to check the subset",
    )


def _matches(pattern: str, record: DownloadRecord, known: Mapping[str, ListedFile]) -> set[str]:
    globs = (f"*{HEADER_SUFFIX}",) if pattern == HEADERS else GROUPS.get(pattern, (pattern,))
    found = {name for name in known if any(fnmatchcase(name, glob) for glob in globs)}
    if pattern in GROUPS:
        found = {name for name in found if not name.endswith(SHARD_SUFFIX)}
    if not found:
        raise UsageError(
            f"{record.repository}: expected files that match `{pattern}`, got 0 of {len(known)} "
            "in the folder's record",
            hint="the record knows what was downloaded; go online to ask for more",
        )
    return found


def _by_index(folder: LocalFolder, settings: DownloadSettings) -> list[_Wanted]:
    if settings.include:
        raise UsageError(
            f"{folder.label}: expected the record of a download, got none; `--include` means "
            "nothing without it",
            hint="leave out `--include`, or run the download online",
        )
    index = read_index(folder)
    if index is None:
        shards = {name for name in folder.files if name.endswith(SHARD_SUFFIX) and "/" not in name}
    else:
        shards = {*index.weight_map.values(), INDEX_FILE}
    return [_Wanted(name, None, None) for name in sorted({CONFIG_FILE, *shards})]


def _absent(folder: LocalFolder, wanted: list[_Wanted]) -> Iterator[Finding]:
    missing = [w for w in wanted if w.name not in folder.files]
    wrong = [
        w for w in wanted
        if w.name in folder.files and w.size not in {None, folder.files[w.name].size}
    ]  # fmt: skip
    partials = _partials(folder)
    if missing or wrong:
        yield _summary_of(folder, wanted, missing, wrong, partials)
    for file in missing:
        wanted_size = "the file" if file.size is None else f"{file.size} bytes"
        yield Finding(
            code="missing-file",
            fault=FaultClass.INCOMPLETE,
            subject=file.name,
            message=f"{file.name}: missing: expected {wanted_size}, got no such file",
            expected=file.size,
            hint="run the download online; it fetches only what is missing",
        )
    for file in wrong:
        got = folder.files[file.name].size
        yield Finding(
            code="wrong-size",
            fault=FaultClass.INCOMPLETE,
            subject=file.name,
            message=f"{file.name}: expected {file.size} bytes, got {got}",
            expected=file.size,
            got=got,
            hint="run the download online; it fetches the file again",
        )
    for name, size in partials.items():
        yield Finding(
            code="partial-file",
            fault=FaultClass.INCOMPLETE,
            severity=Severity.ERROR if missing else Severity.WARNING,
            subject=name,
            message=f"{name}: expected a finished file, got a partial one of {size} bytes",
            got=size,
        )


def _summary_of(
    folder: LocalFolder,
    wanted: list[_Wanted],
    missing: list[_Wanted],
    wrong: list[_Wanted],
    partials: Mapping[str, int],
) -> Finding:
    shards = [w for w in wanted if w.name.endswith(SHARD_SUFFIX)]
    lost = [w for w in missing if w.name.endswith(SHARD_SUFFIX)]
    parts = [f"{len(lost)} of {len(shards)} shards missing"]
    if len(missing) > len(lost):
        parts.append(f"{len(missing) - len(lost)} other files missing")
    if wrong:
        parts.append(f"{len(wrong)} of the wrong size")
    if partials:
        parts.append(f"{len(partials)} partial ({sum(partials.values())} bytes)")
    return Finding(
        code="incomplete",
        fault=FaultClass.INCOMPLETE,
        subject=folder.label,
        message=f"{folder.label}: {', '.join(parts)}",
        expected=len(wanted),
        got=len(wanted) - len(missing) - len(wrong),
        hint="run the download online; it fetches only what is missing",
    )


def _partials(folder: LocalFolder) -> dict[str, int]:
    own = {n: f.size for n, f in folder.files.items() if n.endswith(PARTIAL_SUFFIX)}
    return {**own, **foreign_partials(folder.root)}


def _bad_headers(folder: LocalFolder, wanted: list[_Wanted]) -> Iterator[Finding]:
    for file in wanted:
        info = folder.files.get(file.name)
        if info is None or not info.regular or not file.name.endswith(SHARD_SUFFIX):
            continue
        fetch = partial(folder.read, file.name)
        scan = scan_header(fetch, file=file.name, file_bytes=info.size)
        yield from scan.findings


def _bad_digests(
    folder: LocalFolder,
    wanted: list[_Wanted],
    record: DownloadRecord | None,
    settings: DownloadSettings,
    progress: Progress,
) -> Iterator[Finding]:
    expected: dict[str, Expected] = {}
    for file in wanted:
        info = folder.files.get(file.name)
        if info is None or file.size not in {None, info.size}:
            continue
        known = settings.manifest.files.get(file.name) if settings.manifest else None
        listed, sha256 = file.listed, known.sha256 if known else None
        if listed is not None:
            # A cut's files have no digest but the one they had when they were written.
            written = record.fetched.get(file.name) if record and listed.cut_id else None
            sha256 = listed.sha256 or sha256 or (written.sha256 if written else None)
        expected[file.name] = Expected(
            size=info.size, sha256=sha256, blob_id=listed.blob_id if listed else None
        )
    verdicts = hash_files(folder.root, expected, progress, stop=Event())
    for name, verdict in verdicts.items():
        if isinstance(verdict, Mismatch):
            yield mismatch_finding(name, verdict, Severity.ERROR)
    unproven = [n for n, v in verdicts.items() if not isinstance(v, Mismatch) and v.by == "size"]
    if unproven:
        yield Finding(
            code="unproven",
            fault=FaultClass.HASH,
            severity=Severity.WARNING,
            subject=unproven[0],
            message=f"{unproven[0]}: expected a digest to compare with, got none for "
            f"{len(unproven)} files",
            got=len(unproven),
            hint="compare with a manifest by `--manifest`, or go online",
        )


def _state(record: DownloadRecord | None, wanted: list[_Wanted], *, whole: bool) -> str:
    if not whole:
        return PARTIAL
    if record is None or record.whole.keys() == {file.name for file in wanted}:
        return COMPLETE
    return SUBSET
