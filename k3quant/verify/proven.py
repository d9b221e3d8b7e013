"""A local record of files whose digest is already known, so that unchanged files are not re-read.

A file counts as unchanged when its path, size, modification time and inode are. A byte changed
under a forged modification time is therefore not seen; `--no-cache` reads everything.
"""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3quant import __version__

# A file written this recently may still change within one tick of its modification time.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was once read of a file.

    Attributes:
        sha256: Its digest.
        values: What its values were checked as and found clean, None where they were not.
    """

    sha256: str
    values: str | None


class ProvenFiles:
    """The record; use it as a context, it is saved when the context ends."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or default_path()
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "ProvenFiles":
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            # Another version may check values by other rules.
            if document["version"] == __version__:
                self._entries = document["files"]
        except (OSError, ValueError, KeyError, TypeError):
            self._entries = {}  # a lost record costs time, nothing else
        return self

    def __exit__(self, *_: object) -> None:
        document = {"version": __version__, "files": self._entries}
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(document), encoding="utf-8")
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)

    def look_up(self, path: Path) -> Proof | None:
        """Return what is known of a file, None where it changed or is unknown."""
        with self._lock:
            entry = self._entries.get(str(path.resolve()))
        if entry is None or entry.get("stamp") != _stamp(path):
            return None
        return Proof(sha256=entry["sha256"], values=entry["values"])

    def remember(self, path: Path, proof: Proof, before: tuple[int, ...] | None) -> None:
        """Record a file that was read whole.

        Args:
            path: The file.
            proof: What was found.
            before: `stamp_of` it before the read; a file that changed since is not recorded.
        """
        stamp = _stamp(path)
        if before is None or stamp != list(before) or stamp is None:
            return
        if time.time() - stamp[1] / 1e9 < _SETTLED_SECONDS:
            return
        entry = {"stamp": stamp, "sha256": proof.sha256, "values": proof.values}
        with self._lock:
            self._entries[str(path.resolve())] = entry


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return size, modification time in nanoseconds, and inode, None where there is no file."""
    stamp = _stamp(path)
    return None if stamp is None else tuple(stamp)


def default_path() -> Path:
    """Return the record's place below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "k3quant" / "proven.json"


def _stamp(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]
