"""`k3quant.download.json`: what a folder was fetched from, what it should hold, what it holds.

It is written before the first byte and after each file, so that a folder always says what it is:
a partial download, a deliberate subset, or the whole checkpoint.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from k3quant.checkpoint.output_file import PARTIAL_SUFFIX, atomic_write
from k3quant.errors import RefusedError, StructureError
from k3quant.hub.listing import HubFile
from k3quant.hub.partial import STATE_SUFFIX

RECORD_FILE = "k3quant.download.json"
LOCK_FILE = ".k3quant-download.lock"
_FORMAT = "k3quant-download"
_VERSION = 1

PARTIAL = "partial"
SUBSET = "subset"
COMPLETE = "complete"


def is_ours(name: str) -> bool:
    """Return whether a name is one that a download itself writes beside the files.

    A repository that was made from a downloaded folder may hold such files; they are not wanted.
    """
    return name in {RECORD_FILE, LOCK_FILE} or name.endswith(
        (PARTIAL_SUFFIX, PARTIAL_SUFFIX + STATE_SUFFIX)
    )


class ListedFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file to have: size, and sha256, git's object id, or what it is cut from."""

    bytes: int
    sha256: str | None = None
    blob_id: str | None = None
    cut_id: str | None = None

    @property
    def etag(self) -> str | None:
        """What tells these bytes from others."""
        return self.sha256 or self.blob_id or self.cut_id


class FetchedFile(msgspec.Struct, frozen=True):
    """A file that is there: its sha256, what that was compared with, and its time of change."""

    sha256: str
    proof: str
    mtime_ns: int


class _Document(msgspec.Struct, kw_only=True):
    format: str
    version: int
    repository: str
    revision: str
    commit: str
    state: str
    include: tuple[str, ...]
    cut: str
    whole: dict[str, ListedFile]
    wanted: dict[str, ListedFile]
    fetched: dict[str, FetchedFile]


_DECODER = msgspec.json.Decoder(_Document)


@dataclass(slots=True, kw_only=True)
class DownloadRecord:
    """The record of one folder.

    Attributes:
        repository: Name of the repository.
        revision: What was asked for.
        commit: What it was resolved to.
        include: What was asked for of it; empty is everything.
        cut: Layers and experts that were cut out of it; empty is all.
        whole: Every file of the checkpoint; empty where nobody had to know.
        wanted: Files the folder should hold.
        fetched: Files it holds, each with its proof.
    """

    repository: str
    revision: str
    commit: str
    include: tuple[str, ...]
    cut: str
    whole: dict[str, ListedFile]
    wanted: dict[str, ListedFile]
    fetched: dict[str, FetchedFile]

    @property
    def state(self) -> str:
        """`complete`, `subset` (all that was wanted, but not all there is) or `partial`."""
        if self.whole and self.whole.keys() <= self.fetched.keys():
            return COMPLETE
        return SUBSET if self.wanted.keys() <= self.fetched.keys() else PARTIAL

    def save(self, folder: Path) -> None:
        """Write the record, whole or not at all.

        Raises:
            ResourceError: The system refused.
        """
        document = _Document(
            format=_FORMAT,
            version=_VERSION,
            repository=self.repository,
            revision=self.revision,
            commit=self.commit,
            state=self.state,
            include=self.include,
            cut=self.cut,
            whole=self.whole,
            wanted=self.wanted,
            fetched=dict(sorted(self.fetched.items())),
        )
        text = msgspec.json.format(msgspec.json.encode(document), indent=2)
        atomic_write(folder / RECORD_FILE, text + b"\n")


def listed(files: Iterable[HubFile]) -> dict[str, ListedFile]:
    """Return files as a record keeps them."""
    return {f.name: ListedFile(f.size, f.sha256, f.blob_id) for f in files}


def load_record(folder: Path) -> DownloadRecord | None:
    """Read the record of a folder, None where there is none.

    Raises:
        StructureError: The record is damaged.
    """
    path = folder / RECORD_FILE
    try:
        document = _DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StructureError(
            f"{path}: expected the record of a download, got {error}",
            hint="remove it and run the download again; finished files are checked and kept",
        ) from error
    if (document.format, document.version) != (_FORMAT, _VERSION):
        raise StructureError(
            f"{path}: expected {_FORMAT} version {_VERSION}, got {document.format} "
            f"{document.version}"
        )
    return DownloadRecord(
        repository=document.repository,
        revision=document.revision,
        commit=document.commit,
        include=document.include,
        cut=document.cut,
        whole=document.whole,
        wanted=document.wanted,
        fetched=document.fetched,
    )


def refuse_other(
    folder: Path,
    record: DownloadRecord,
    *,
    repository: str,
    commit: str,
    cut: str,
    accept_new: bool,
) -> None:
    """Refuse to mix two repositories, commits or cuts in one folder.

    Raises:
        RefusedError: The record is of another repository or cut, or of another commit that was not
            accepted.
    """
    if record.repository != repository:
        raise RefusedError(
            f"{folder}: expected a folder for {repository}, got one of {record.repository}",
            hint="name another folder",
        )
    if record.cut != cut:
        raise RefusedError(
            f"{folder}: expected a folder of {cut or 'the whole model'}, got one of "
            f"{record.cut or 'the whole model'}",
            hint="name another folder",
        )
    if record.commit != commit and not accept_new:
        raise RefusedError(
            f"{folder}: expected commit {record.commit} as it was begun, got {commit} (the "
            "revision has moved)",
            hint=f"go on with `{repository}@{record.commit}`, or accept the new commit with "
            "`--accept-new-commit`: files that did not change are kept",
        )
