"""The files beside the shards: which are copied, which a new layout replaces, which stay behind."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from k3quant.checkpoint.folder import FileInfo, Source
from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.checkpoint.journal import JOURNAL_FILE
from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.manifest import SUMS_FILE
from k3quant.report import FaultClass, Finding, Severity
from k3quant.sizes import format_size

SET_ASIDE_FOLDER = ".k3quant-source"
_LEFT_FOLDERS = frozenset({".cache", ".git", SET_ASIDE_FOLDER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """What happens to the files that are no shards.

    Attributes:
        copied: Files copied byte for byte.
        skipped: Files left behind: what the new layout replaces, leftovers, strays.
        has_sums: Whether a SHA256SUMS is written anew, as the source has one.
        warnings: Weights that the index does not name.
    """

    copied: tuple[str, ...]
    skipped: tuple[str, ...]
    has_sums: bool
    warnings: tuple[Finding, ...]


def sort_sidecars(
    source: Source, shards: Collection[str], *, rewritten: Collection[str] = ()
) -> Sidecars:
    """Sort a checkpoint's files.

    Args:
        source: Its files.
        shards: Its shards.
        rewritten: Files that are written anew.
    """
    copied: list[str] = []
    skipped: list[str] = []
    strays: list[str] = []
    for file, info in source.files.items():
        if file in shards:
            continue
        if file.endswith(SHARD_SUFFIX):
            strays.append(file)
        if file.endswith(SHARD_SUFFIX) or _stays_behind(file, info) or file in rewritten:
            skipped.append(file)
        else:
            copied.append(file)
    return Sidecars(
        copied=tuple(sorted(copied)),
        skipped=tuple(sorted(skipped)),
        has_sums=SUMS_FILE in source.files,
        warnings=_warn(strays, source.files),
    )


def is_index(file: str) -> bool:
    """Return whether a file of the folder is an index: the overall one or a rank's."""
    stem = INDEX_FILE.removesuffix(".json")
    return file == INDEX_FILE or (file.startswith(f"{stem}.") and file.endswith(".json"))


def rewrite_sums(old: str, digests: Mapping[str, str], gone: Collection[str]) -> str:
    """Return a SHA256SUMS with the outputs' digests in place of the source shards' lines.

    Args:
        old: The source's file.
        digests: Digest of each output and rewritten file.
        gone: Files that are no longer there.
    """
    lines = []
    for line in old.splitlines():
        _, _, file = line.partition(" ")
        if file[1:] not in gone and file[1:] not in digests and line:
            lines.append(line)
    lines += [f"{digest}  {file}" for file, digest in digests.items()]
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[66:]))


def _stays_behind(file: str, info: FileInfo) -> bool:
    path = PurePosixPath(file)
    return (
        is_index(file)
        or not info.regular
        or file in (JOURNAL_FILE, SUMS_FILE)
        or path.suffix in (PARTIAL_SUFFIX, ".incomplete")
        or not _LEFT_FOLDERS.isdisjoint(path.parts[:-1])
    )


def _warn(strays: list[str], files: Mapping[str, FileInfo]) -> tuple[Finding, ...]:
    if not strays:
        return ()
    total = sum(files[file].size for file in strays)
    finding = Finding(
        code="stray-shards",
        fault=FaultClass.STRUCTURE,
        severity=Severity.WARNING,
        subject=strays[0],
        message=f"{len(strays)} files: expected only shards that the index names, got "
        f"{', '.join(strays[:5])} ({format_size(total)}), left behind",
        got=len(strays),
    )
    return (finding,)
