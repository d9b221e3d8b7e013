"""A source that is taken apart: its shards under other names, its headers kept until the end.

Work in place first moves shards and indexes into a hidden folder, where no loader takes them for
a checkpoint. Each shard's header is kept beside, so that the plan can be made again when shards
are gone. `source.json` appears when all headers are kept, `claimed` when all files were moved.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3quant.checkpoint.folder import FileInfo, LocalFolder
from k3quant.checkpoint.output_file import atomic_write, sync_folder
from k3quant.checkpoint.reader import Checkpoint
from k3quant.errors import RefusedError, ResourceError
from k3quant.manifest import SUMS_FILE
from k3quant.repack.sidecars import SET_ASIDE_FOLDER, is_index

_LIST = "source.json"
_CLAIMED = "claimed"


class SetAside:
    """The files of a folder as they were before work in place began.

    Attributes:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._aside = root / SET_ASIDE_FOLDER
        listed: dict[str, Any] = json.loads((self._aside / _LIST).read_text())
        self._heads: dict[str, int] = listed["headers"]
        self._moved: dict[str, int] = listed["files"]
        self._files = {
            file: info
            for file, info in LocalFolder(root).files.items()
            if not file.startswith(f"{SET_ASIDE_FOLDER}/") and file not in self._moved
        }
        self._files |= {file: FileInfo(size=size) for file, size in self._moved.items()}

    @property
    def label(self) -> str:
        """The folder's path."""
        return str(self.root)

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """Every file, those set aside under their old names and sizes."""
        return self._files

    def path(self, file: str) -> Path:
        """Return where a file lies now; a shard whose tensors all moved on is gone."""
        return _aside_path(self.root, file) if file in self._moved else self.root / file

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Read a range; a header is there even when its shard is gone."""
        if file in self._heads and offset + length <= self._heads[file]:
            return _read(_head_path(self.root, file), offset, length)
        return _read(self.path(file), offset, length)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a range."""
        buffer[:] = self.read(file, offset, len(buffer))

    def claim(self) -> None:
        """Move every shard and index into the hidden folder, or go on doing it.

        Raises:
            ResourceError: The system refused.
        """
        marker = self._aside / _CLAIMED
        if marker.exists():
            return
        for file in self._moved:
            target = _aside_path(self.root, file)
            if not target.exists():
                (self.root / file).rename(target)
        for folder in {(self.root / file).parent for file in self._moved}:
            sync_folder(folder)
        sync_folder(self._aside)
        atomic_write(marker, b"")


def is_set_aside(root: Path) -> bool:
    """Return whether work in place began in a folder and did not end."""
    return (root / SET_ASIDE_FOLDER / _LIST).exists()


def begin_set_aside(root: Path, checkpoint: Checkpoint) -> SetAside:
    """Keep the headers of a checkpoint's shards; nothing is moved yet.

    Raises:
        RefusedError: A shard has a second name, whose content would be lost with it.
        ResourceError: The system refused.
    """
    _refuse_shared(root, checkpoint.headers)
    aside = root / SET_ASIDE_FOLDER
    aside.mkdir(exist_ok=True)
    if left := sorted(path.name for path in aside.glob("*.moved")):
        raise RefusedError(
            f"{aside}: expected no files of earlier work, got {left[0]} without {_LIST}",
            hint="look whether the folder still needs them, then remove it",
        )
    heads = {file: header.data_start for file, header in checkpoint.headers.items()}
    for file, length in heads.items():
        atomic_write(_head_path(root, file), checkpoint.source.read(file, 0, length))
    sizes = {file: header.file_bytes for file, header in checkpoint.headers.items()}
    on_disk = LocalFolder(root).files
    for file, info in on_disk.items():
        if is_index(file) or file == SUMS_FILE:
            sizes[file] = info.size
    atomic_write(aside / _LIST, json.dumps({"headers": heads, "files": sizes}).encode())
    sync_folder(root)
    return SetAside(root)


def end_set_aside(root: Path) -> None:
    """Remove the hidden folder, its list last, so that a cut removal is known for what it is."""
    aside = root / SET_ASIDE_FOLDER
    for path in aside.iterdir():
        if path.name != _LIST:
            path.unlink()
    sync_folder(aside)
    shutil.rmtree(aside)
    sync_folder(root)


def _refuse_shared(root: Path, shards: Iterable[str]) -> None:
    for file in shards:
        path = root / file
        names = path.stat().st_nlink
        if path.is_symlink() or names > 1:
            what = "a symbolic link" if path.is_symlink() else f"a file of {names} names"
            raise RefusedError(
                f"{file}: expected a file of its own, got {what}",
                hint="work in place would empty what another folder uses; name an `--out`",
            )


def _aside_path(root: Path, file: str) -> Path:
    return root / SET_ASIDE_FOLDER / f"{_flat(file)}.moved"


def _head_path(root: Path, file: str) -> Path:
    return root / SET_ASIDE_FOLDER / f"{_flat(file)}.header"


def _flat(file: str) -> str:
    return file.replace("%", "%25").replace("/", "%2F")


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO).lower()
        raise ResourceError(f"{path.name}: expected to read it, got {reason}") from error
