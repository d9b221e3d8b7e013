"""The last files of a repack: rewritten sidecars, digests, indexes, the overall index last."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3quant.checkpoint.journal import Journal
from k3quant.checkpoint.output_file import atomic_write
from k3quant.manifest import SUMS_FILE
from k3quant.repack.plan import RepackPlan
from k3quant.repack.sidecars import rewrite_sums


def write_last(plan: RepackPlan, out: Path, journal: Journal) -> None:
    """Write what follows the shards, and remember that the job ended.

    Raises:
        ResourceError: The system refused a write.
    """
    documents = dict(plan.rewritten())
    indexes = dict(plan.index_files())
    if plan.sidecars.has_sums:
        documents[SUMS_FILE] = _sums(plan, out, journal, documents | indexes)
    for file, content in (documents | indexes).items():
        atomic_write(out / file, content)
    journal.mark_complete()


def outputs_of(journal: Journal) -> list[dict[str, Any]]:
    """Return every output's size and digest; a hard link that was not read has none."""
    return [
        {
            "file": file,
            "size": output.written.size,
            "sha256": output.written.sha256 or None,
        }
        for file, output in sorted(journal.finished.items())
    ]


def _sums(plan: RepackPlan, out: Path, journal: Journal, documents: Mapping[str, bytes]) -> bytes:
    """Return the output's SHA256SUMS: the source's lines where they still hold, and new ones."""
    source = plan.checkpoint.source
    old = source.read(SUMS_FILE, 0, source.files[SUMS_FILE].size).decode("utf-8", "replace")
    listed = {line.partition(" ")[2][1:] for line in old.splitlines()}
    digests = {
        file: hashlib.sha256(content).hexdigest()
        for file, content in documents.items()
        if file in listed
    }
    for file, output in journal.finished.items():
        digests[file] = output.written.sha256 or _digest(out / file)
    gone = {*plan.checkpoint.headers, *plan.sidecars.skipped}
    return rewrite_sums(old, digests, gone).encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
