"""What a repository holds at one commit: names, sizes and digests, without any payload.

A branch is resolved to its commit once; every later request names that commit, so a branch that
moves meanwhile changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from k3quant.errors import ResourceError, StructureError
from k3quant.hub.client import HubClient
from k3quant.hub.reference import Reference, is_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository.

    Attributes:
        name: Path below the repository's root.
        size: Bytes.
        sha256: Digest in hex where the file is stored by digest, else None.
        blob_id: Git's object id (sha1 of the length and the bytes) where it lies in git, else None.
    """

    name: str
    size: int
    sha256: str | None
    blob_id: str | None

    @property
    def etag(self) -> str | None:
        """What tells these bytes from others: the sha256 or the object id."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A repository at one commit.

    Attributes:
        reference: What was asked for.
        pinned: The same repository at the commit.
        files: Its files by name; folders are none.
    """

    reference: Reference
    pinned: Reference
    files: Mapping[str, HubFile]


def list_files(client: HubClient, reference: Reference) -> Listing:
    """Resolve a reference to its commit and list the files there.

    Raises:
        UsageError: There is no such repository or revision, or access is denied.
        StructureError: A file's name leads outside the repository.
        ResourceError: The server failed for as long as the policy allows, or lists no sizes.
        StoppedError: The work was told to stop meanwhile.
    """
    pinned = reference.at(_resolve(client, reference))
    path = pinned.api_path(f"/tree/{pinned.revision}?recursive=true&expand=false")
    rows = client.get_json(path, subject=str(reference))
    if not isinstance(rows, list):
        raise _malformed(client, path, "a list of files", rows)
    files: dict[str, HubFile] = {}
    for row in rows:
        if isinstance(row, dict) and row.get("type") == "directory":
            continue
        file = _file_of(row)
        if file is None:
            raise _malformed(client, path, "a path and a size for each file", row)
        _refuse_outside(file.name)
        files[file.name] = file
    return Listing(reference=reference, pinned=pinned, files=files)


def _resolve(client: HubClient, reference: Reference) -> str:
    path = reference.api_path(f"/revision/{quote(reference.revision, safe='')}")
    info = client.get_json(path, subject=str(reference))
    commit = info.get("sha") if isinstance(info, dict) else None
    if not isinstance(commit, str) or not is_commit(commit):
        raise _malformed(client, path, "a commit as `sha`", commit)
    return commit


def _file_of(row: Any) -> HubFile | None:
    if not isinstance(row, dict):
        return None
    name, size, oid, lfs = row.get("path"), row.get("size"), row.get("oid"), row.get("lfs")
    if isinstance(lfs, dict):
        sha256, size = lfs.get("oid"), lfs.get("size", size)
        digests_ok = isinstance(sha256, str) and len(sha256) == 64
        oid = None  # the object is the pointer, not the bytes
    else:
        sha256, digests_ok = None, oid is None or isinstance(oid, str)
    if not isinstance(name, str) or type(size) is not int or size < 0 or not digests_ok:
        return None
    return HubFile(name=name, size=size, sha256=sha256, blob_id=oid)


def _refuse_outside(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise StructureError(f"listing: expected file names inside the repository, got `{name}`")


def _malformed(client: HubClient, path: str, expected: str, got: Any) -> ResourceError:
    url = client.url(path).partition("?")[0]
    return ResourceError(f"{url}: expected {expected}, got {repr(got)[:120]}")
