"""The index against the files: what is missing, in the wrong file, counted wrong, or extra."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

from k3quant.checkpoint.folder import FileInfo
from k3quant.checkpoint.header import Header
from k3quant.checkpoint.index import INDEX_FILE, Index
from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.report import FaultClass, Finding, Severity, fault
from k3quant.sizes import format_size

SHARD_SUFFIX = ".safetensors"
_index_fault = partial(fault, FaultClass.STRUCTURE)
_SHOWN = 20  # findings of one kind before the rest is counted in one line


def join_index(
    index: Index, files: Mapping[str, FileInfo], headers: Mapping[str, Header]
) -> Iterator[Finding]:
    """Yield every disagreement between an index and the files beside it.

    Args:
        index: The parsed index.
        files: All files of the checkpoint.
        headers: Headers that could be parsed, by file: those of the index and strays beside them.
    """
    held = index.tensors_by_file()
    absent = [file for file in sorted(held) if file not in files]
    if absent and len(absent) == len(held):
        yield _stale(index, headers, len(held))
        return
    yield from _missing_files(absent, held, files)
    yield from _misplaced(index, files, headers)
    yield from _total_size(index, files, headers)


def _stale(index: Index, headers: Mapping[str, Header], named: int) -> Finding:
    names = {name for header in headers.values() for name in header.tensors}
    found = sum(name in names for name in index.weight_map)
    which = "all" if found == len(index.weight_map) else str(found)
    return Finding(
        code="stale-index",
        fault=FaultClass.STRUCTURE if found else FaultClass.INCOMPLETE,
        subject=INDEX_FILE,
        message=f"{INDEX_FILE}: expected the files it names, got 0 of {named} named files; "
        f"{len(headers)} unindexed files hold {which} {len(index.weight_map)} names",
        expected=named,
        got=0,
        hint="the index belongs to another sharding; `k3quant repack --rebuild-index` writes one"
        if found
        else "the shards are missing; `k3quant download` fetches them",
    )


def _missing_files(
    absent: list[str], held: Counter[str], files: Mapping[str, FileInfo]
) -> Iterator[Finding]:
    for file in absent:
        yield Finding(
            code="missing-file",
            fault=FaultClass.INCOMPLETE,
            subject=file,
            message=f"{file}: missing: expected {held[file]} tensors, got no such file "
            f"({len(absent)} of {len(held)} files missing)",
            expected=held[file],
            got=0,
            hint="`k3quant download` fetches only what is missing",
        )
    # Our own partial files count where they become a shard, not where a sidecar or an output grows.
    partial = {
        file: info.size
        for file, info in files.items()
        if file.endswith(".incomplete")
        or (file.endswith(PARTIAL_SUFFIX) and file.removesuffix(PARTIAL_SUFFIX) in held)
    }
    for file, size in partial.items():
        yield Finding(
            code="partial-file",
            fault=FaultClass.INCOMPLETE,
            severity=Severity.ERROR if absent else Severity.WARNING,
            subject=file,
            message=f"{file}: expected a finished download, got 1 partial file of {size} bytes",
            got=size,
            hint="the download was interrupted; run it again",
        )


def _misplaced(
    index: Index, files: Mapping[str, FileInfo], headers: Mapping[str, Header]
) -> Iterator[Finding]:
    indexed_files = set(index.weight_map.values())
    # One set operation a file finds whether there is anything to look at, at 497,220 names.
    by_file: dict[str, set[str]] = {file: set() for file in indexed_files}
    for name, file in index.weight_map.items():
        by_file[file].add(name)
    faults: list[Finding] = []
    for file in sorted(indexed_files & headers.keys()):
        actual = headers[file].tensors.keys()
        if not actual:
            count = len(by_file[file])
            message = (
                f"{file}: {count} indexed tensors missing: expected {count}, got an empty file"
            )
            faults.append(_index_fault("empty-file", file, message, expected=count, got=0))
            continue
        for name in sorted(by_file[file] - actual):
            places = [f for f, header in headers.items() if name in header.tensors]
            where = places[0] if places else "no file"
            faults.append(
                _index_fault(
                    "wrong-file",
                    file,
                    f"{name}: the index says {file}, got it in {where}",
                    expected=file,
                    got=where,
                )
            )
        for name in sorted(actual - by_file[file]):
            other = index.weight_map.get(name)
            if other is None:
                message = f"{name}: expected it in the index, got it only in {file}"
                faults.append(_index_fault("not-indexed", file, message))
            elif other in headers and name in headers[other].tensors:
                message = f"{name}: expected it in one file, got it in {other} and {file}"
                faults.append(_index_fault("in-two-files", file, message))
    yield from faults[:_SHOWN]
    if len(faults) > _SHOWN:
        rest = len(faults) - _SHOWN
        message = f"{INDEX_FILE}: and {rest} more tensors that index and files disagree about"
        yield _index_fault("more", INDEX_FILE, message, got=rest)


def _total_size(
    index: Index, files: Mapping[str, FileInfo], headers: Mapping[str, Header]
) -> Iterator[Finding]:
    if index.total_size is None:
        yield Finding(
            code="no-total-size",
            fault=FaultClass.STRUCTURE,
            severity=Severity.WARNING,
            subject=INDEX_FILE,
            message=f"{INDEX_FILE}: expected metadata.total_size, got none",
        )
        return
    indexed = set(index.weight_map.values())
    if not indexed <= headers.keys():
        return  # a file is missing or unreadable, which is said elsewhere
    tensor_bytes = sum(
        entry.end - entry.begin for file in indexed for entry in headers[file].tensors.values()
    )
    if index.total_size == tensor_bytes:
        return
    file_bytes = sum(files[file].size for file in indexed)
    because = ""
    if index.total_size == file_bytes:
        because = f", the sum of file sizes: {file_bytes - tensor_bytes} bytes of headers too many"
    yield Finding(
        code="total-size",
        fault=FaultClass.STRUCTURE,
        subject=INDEX_FILE,
        message=f"{INDEX_FILE}: expected total_size {tensor_bytes} (the sum of tensor bytes), got "
        f"{index.total_size}{because}",
        expected=tensor_bytes,
        got=index.total_size,
        hint="`k3quant repack --rebuild-index` writes a right one",
    )


def extra_files(index: Index, files: Mapping[str, FileInfo]) -> Iterator[Finding]:
    """Yield one warning for safetensors files that the index does not name."""
    named = set(index.weight_map.values())
    extra = {
        file: info.size
        for file, info in files.items()
        if file.endswith(SHARD_SUFFIX) and file not in named
    }
    if extra:
        total = sum(extra.values())
        yield Finding(
            code="extra-files",
            fault=FaultClass.STRUCTURE,
            severity=Severity.WARNING,
            subject=min(extra),
            message=f"{len(extra)} files ({total} bytes) not in index: "
            f"{', '.join(sorted(extra)[:5])}",
            got=total,
            hint=f"a loader that takes every *.safetensors reads {format_size(total)} too much",
        )
