"""Making a manifest from a checkpoint's files, or from a listing that states their digests."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from k3quant.checkpoint.folder import Source
from k3quant.checkpoint.header import LENGTH_BYTES
from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.reader import CONFIG_FILE, Checkpoint, open_checkpoint
from k3quant.manifest import FileRecord, Manifest
from k3quant.models.k3_config import looks_like_k3, read_config
from k3quant.models.k3_counts import count_model
from k3quant.progress import SILENT, Progress
from k3quant.verify.stream import default_jobs, hash_file

SIDE_RECORD = "k3quant."
"""Our own records beside a checkpoint are no part of it."""


def create_manifest(
    source: Source, *, name: str, repository: str | None = None, revision: str | None = None,
    jobs: int | None = None, progress: Progress = SILENT,
) -> Manifest:  # fmt: skip
    """Make a manifest of a checkpoint.

    Shards whose digest the source itself states are not read beyond their header.

    Args:
        source: The checkpoint's files.
        name: Name of the manifest.
        repository: Hub repository it came from.
        revision: Commit it came from.
        jobs: Files hashed at once; None takes the processors.
        progress: Told the bytes hashed.

    Raises:
        K3QuantError: The checkpoint does not open, or a file cannot be read.
    """
    checkpoint = open_checkpoint(source)
    files = [
        file
        for file, info in source.files.items()
        if info.regular and _belongs(file, checkpoint.headers)
    ]
    unread = [file for file in files if source.files[file].sha256 is None]
    progress.start("hash", sum(source.files[file].size for file in unread), "B")

    def record(file: str) -> FileRecord:
        info = source.files[file]
        digest = info.sha256 or hash_file(source, file, advance=progress.advance)
        header = checkpoint.headers.get(file)
        if header is None:
            return FileRecord(bytes=info.size, sha256=digest)
        raw = source.read(file, LENGTH_BYTES, header.json_bytes)
        return FileRecord(
            bytes=info.size,
            sha256=digest,
            header_bytes=header.json_bytes,
            header_sha256=hashlib.sha256(raw).hexdigest(),
            tensors=len(header.tensors),
        )

    with ThreadPoolExecutor(jobs or default_jobs()) as pool:
        records = dict(zip(files, pool.map(record, files), strict=True))
    return Manifest(
        name=name,
        repository=repository,
        revision=revision,
        files=records,
        totals=_totals(checkpoint, records),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest for its file."""
    return (json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


def _belongs(file: str, shards: Mapping[str, object]) -> bool:
    if file in shards or file in {CONFIG_FILE, INDEX_FILE}:
        return True
    hidden = any(part.startswith(".") for part in file.split("/"))
    stray = file.endswith((".safetensors", ".partial", ".incomplete"))
    return not hidden and not stray and not file.startswith(SIDE_RECORD)


def _totals(checkpoint: Checkpoint, records: Mapping[str, FileRecord]) -> dict[str, int]:
    shards = checkpoint.headers
    totals = {
        "tensors": len(checkpoint.entries),
        "tensor_bytes": sum(entry.length for entry in checkpoint.entries.values()),
        "file_bytes": sum(records[file].bytes or 0 for file in shards),
        "shards": len(shards),
    }
    if looks_like_k3(checkpoint.config):
        counts = count_model(read_config(checkpoint.config))
        totals |= {
            "parameters": counts.parameters,
            "active_parameters": counts.active_parameters,
        }
    return totals
