"""Which files of a repository a download wants: the index's shards and what is no weight.

Shards are never found by a pattern over `*.safetensors`: copies in subfolders and strays beside
the index would come along.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from k3quant.checkpoint.index import INDEX_FILE, Index
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.errors import IncompleteError, UsageError
from k3quant.hub.listing import HubFile, Listing
from k3quant.hub.record import is_ours

# Weights in other formats lie beside the shards in some repositories.
_WEIGHT_SUFFIXES = (
    SHARD_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz",
)  # fmt: skip

GROUPS = {
    "config": ("config.json", "generation_config.json", "configuration_*.py"),
    "tokenizer": (
        "tiktoken.model", "tokenizer*", "tokenization_*.py", "encoding_*.py", "vocab*",
        "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    ),
    "code": ("*.py",),
    "index": (INDEX_FILE,),
    "sidecars": ("*",),
}  # fmt: skip
"""What `include` may name besides files: groups of files that are no weights."""

HEADERS = "headers"
"""What `include` names to have each shard's header as a file of its own."""

HEADER_SUFFIX = ".header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Files of one commit.

    Attributes:
        wanted: Those to have.
        whole: Every file of the checkpoint: shards of the index and all that is no weight. Empty
            where nobody had to know.
        strays: Files that hold weights but belong to no index, as far as is known.
    """

    wanted: tuple[HubFile, ...]
    whole: tuple[HubFile, ...]
    strays: tuple[HubFile, ...]


def is_sidecar(name: str) -> bool:
    """Return whether a file belongs beside the shards: no weights, and none of our own records."""
    return not name.endswith(_WEIGHT_SUFFIXES) and not is_ours(name)


def select_files(
    listing: Listing, read_index: Callable[[], Index | None], include: Iterable[str]
) -> Selection:
    """Choose what to have of a listing.

    Args:
        listing: The files.
        read_index: Returns the repository's index, None where it has none; called only where the
            shards matter.
        include: Groups, file names and patterns; nothing wants everything.

    Raises:
        IncompleteError: The listing lacks shards, or there are shards but no index.
        UsageError: A name or pattern matches nothing.
    """
    patterns = tuple(include)
    sidecars = [f for f in listing.files.values() if is_sidecar(f.name)]
    if patterns and all(p in GROUPS or p in listing.files for p in patterns):
        names = {name for p in patterns for name in _matches(p, listing, [], sidecars)}
        return Selection(wanted=_in_order(listing, names), whole=(), strays=())
    shards = _shards(listing, read_index())
    whole = _in_order(listing, {f.name for f in sidecars} | shards)
    strays = tuple(f for f in listing.files.values() if f not in whole and not is_ours(f.name))
    if not patterns:
        return Selection(wanted=whole, whole=whole, strays=strays)
    names = {name for p in patterns for name in _matches(p, listing, whole, sidecars)}
    return Selection(wanted=_in_order(listing, names), whole=whole, strays=strays)


def _in_order(listing: Listing, names: set[str]) -> tuple[HubFile, ...]:
    """Return files in the order to fetch them: small things first, then shards by name."""
    files = (listing.files[name] for name in names)
    return tuple(sorted(files, key=lambda f: (f.name.endswith(SHARD_SUFFIX), f.name)))


def _matches(
    pattern: str, listing: Listing, whole: Iterable[HubFile], sidecars: Iterable[HubFile]
) -> set[str]:
    if pattern in GROUPS:
        globs = GROUPS[pattern]
        found = {f.name for f in sidecars if any(fnmatchcase(f.name, glob) for glob in globs)}
    elif pattern in listing.files:  # named in full, it is wanted even where it is a stray
        found = {pattern}
    else:
        found = {f.name for f in whole if fnmatchcase(f.name, pattern)}
    if not found:
        raise UsageError(
            f"{listing.pinned}: expected files that match `{pattern}`, got 0 of "
            f"{len(listing.files)}",
            hint=f"name files, patterns, or groups: {', '.join([*GROUPS, HEADERS])}",
        )
    return found


def _shards(listing: Listing, index: Index | None) -> set[str]:
    there = [name for name in listing.files if name.endswith(SHARD_SUFFIX) and "/" not in name]
    if index is None:
        if len(there) == 1:
            return {there[0]}
        if there:
            raise IncompleteError(
                f"{listing.pinned}: index missing: expected {INDEX_FILE} beside "
                f"{len(there)} shards",
                hint="fetch them by name with `--include`, then `k3quant repack --rebuild-index`",
            )
        raise IncompleteError(
            f"{listing.pinned}: expected {INDEX_FILE} and its shards, got 0 shards among "
            f"{len(listing.files)} files",
            hint="use `--include` for a repository that holds no weights",
        )
    named = set(index.weight_map.values())
    found = named & listing.files.keys()
    if len(found) < len(named):
        absent = sorted(named - listing.files.keys())
        raise IncompleteError(
            f"{listing.pinned}: expected {len(named)} shards, got {len(found)} of {len(named)}; "
            f"first missing is {absent[0]}",
            hint="the repository itself is incomplete",
        )
    return found
