"""Manifests: what a checkpoint's files must be, by size and digest.

Source: the format is described by `manifests/manifest.schema.json`; a `SHA256SUMS` file is read as
a manifest that knows digests alone.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from k3quant.errors import SchemaError, UsageError

FORMAT = "k3quant-manifest"
VERSION = 1
SUMS_FILE = "SHA256SUMS"
PROOF_FILE = "k3quant.proof.json"
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file: size in bytes, digests in hex, and for a shard its header and tensor count."""

    bytes: int | None = None
    sha256: str | None = None
    header_bytes: int | None = None
    header_sha256: str | None = None
    tensors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint must be.

    Attributes:
        name: Its name, such as `kimi-k3`.
        repository: Hub repository, None for a local folder.
        revision: Commit it was made from, None where unknown.
        files: Every file it knows.
        totals: Tensors, parameters and bytes of the whole checkpoint.
    """

    name: str
    repository: str | None = None
    revision: str | None = None
    files: Mapping[str, FileRecord]
    totals: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest in its published form."""
        files = {
            file: {key: value for key, value in asdict(record).items() if value is not None}
            for file, record in sorted(self.files.items())
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "repository": self.repository,
            "revision": self.revision,
            "totals": dict(self.totals),
            "files": files,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two manifests."""

    file: str
    what: str
    before: str
    after: str


def built_in_names() -> list[str]:
    """Return the names of the manifests that ship with the package."""
    folder = resources.files("k3quant.manifests")
    names = [file.name.split(".") for file in folder.iterdir()]
    return sorted(parts[0] for parts in names if parts[1:] == ["json"])


def load_manifest(place: str | Path) -> Manifest:
    """Load a manifest by built-in name or path; a path may lead to a SHA256SUMS file.

    Raises:
        UsageError: There is no such name or file.
        SchemaError: The file is no manifest.
    """
    if str(place) in built_in_names():
        folder = resources.files("k3quant.manifests")
        return parse_manifest(folder.joinpath(f"{place}.json").read_text(), str(place))
    path = Path(place)
    if not path.is_file():
        names = ", ".join(built_in_names())
        raise UsageError(
            f"manifest {place}: expected a file or a built-in name ({names}), got neither"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if _SUM_LINE.match(text):
        return parse_sums(text, path.name)
    return parse_manifest(text, path.name)


def load_config(place: str | Path) -> dict[str, Any]:
    """Load a config by built-in name, the name `nano`, or the path of a config.json.

    Raises:
        UsageError: There is no such name or file.
        SchemaError: The file holds no JSON object.
    """
    if str(place) in built_in_names():
        folder = resources.files("k3quant.manifests")
        text = folder.joinpath(f"{place}.config.json").read_text()
    elif str(place) == "nano":
        text = resources.files("k3quant").joinpath("nano", "config.json").read_text()
    elif Path(place).is_file():
        text = Path(place).read_text(encoding="utf-8")
    else:
        names = ", ".join([*built_in_names(), "nano"])
        raise UsageError(f"profile {place}: expected a config.json or a name ({names}), got none")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"{place}: expected JSON, got {error}") from error
    if not isinstance(config, dict):
        raise SchemaError(f"{place}: expected an object, got {type(config).__name__}")
    return config


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse a manifest.

    Raises:
        SchemaError: It is no manifest of a known version.
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise SchemaError(
                f"{where}: expected {FORMAT} version {VERSION}, got "
                f"{document['format']} {document['version']}"
            )
        return Manifest(
            name=document["name"],
            repository=document["repository"],
            revision=document["revision"],
            totals=document["totals"],
            files={file: FileRecord(**fields) for file, fields in document["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{where}: expected a {FORMAT}, got {error!r}") from error


def parse_sums(text: str, where: str) -> Manifest:
    """Parse the output of `sha256sum`.

    Raises:
        SchemaError: A line is no digest and name.
    """
    files: dict[str, FileRecord] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise SchemaError(f"{where}: expected digest and file on line {number}, got `{line}`")
        files[match[2]] = FileRecord(sha256=match[1])
    return Manifest(name=where, files=files)


def parse_proof(text: str, where: str) -> Manifest:
    """Parse the digests of a conversion's proof.

    Raises:
        SchemaError: It is no proof.
    """
    try:
        document = json.loads(text)
        files = {
            file: FileRecord(bytes=record["bytes"], sha256=record["sha256"])
            for file, record in document["output"].items()
        }
        files["config.json"] = FileRecord(sha256=document["job"]["config_sha256"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{where}: expected a k3quant-proof, got {error!r}") from error
    return Manifest(name=where, files=files)


def diff_manifests(before: Manifest, after: Manifest) -> Iterator[Change]:
    """Yield what differs between two manifests, file by file."""
    for file in sorted(before.files.keys() | after.files.keys()):
        old, new = before.files.get(file), after.files.get(file)
        if old is None or new is None:
            yield Change(file, "file", "absent" if old is None else "present",
                         "absent" if new is None else "present")  # fmt: skip
            continue
        for key in ("bytes", "sha256", "header_sha256", "tensors"):
            a, b = getattr(old, key), getattr(new, key)
            if a is not None and b is not None and a != b:
                yield Change(file, key, str(a), str(b))
    for key in sorted(before.totals.keys() & after.totals.keys()):
        if before.totals[key] != after.totals[key]:
            yield Change("totals", key, str(before.totals[key]), str(after.totals[key]))
