"""How a weight matrix lies in a checkpoint: which tensors, of which dtype and shape.

A storage form is recognised by the tensors that exist beside a module's name, never by what the
config says. Torch-free: `verify` reads headers with it.

Source: vllm-project/compressed-tensors `compressors/`, NVIDIA/Model-Optimizer `export/`, OCP MX
specification v1.0 section 6.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Stored = tuple[str, tuple[int, ...]]
"""Dtype and shape of one stored tensor."""

Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]
"""Accepted shapes of a part, from the rows and columns of the weight."""

_SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a storage form: accepted dtypes and shapes."""

    dtypes: tuple[str, ...]
    shapes: Shapes
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to store a matrix.

    Attributes:
        name: The format, as `convert --to` names it.
        parts: Tensors by suffix after the module's name.
    """

    name: str
    parts: Mapping[str, Part]


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _whole(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    return ((N, K),)


def _pairs(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    return ((N, _ceil(K, 2)),)


def _groups(size: int) -> Shapes:
    return lambda N, K: ((N, _ceil(K, size)),)


def _channel(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    return ((N, 1), (N,))


def _tiles(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    rows, cols = _ceil(N, 128), _ceil(K, 128)
    return ((rows, cols), (rows, 1, cols, 1))


def _one(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    return ((1,), ())


def _two(N: int, K: int) -> tuple[tuple[int, ...], ...]:
    return ((2,),)


_FP8 = Part(("F8_E4M3",), _whole)
_E8M0 = Part(("U8", "F8_E8M0"), _groups(32))
_E4M3 = Part(("F8_E4M3",), _groups(16))
_INPUT = Part(("F32",), _one, optional=True)

STORAGES: tuple[Storage, ...] = (
    Storage(
        "mxfp4",
        {"weight_packed": Part(("U8",), _pairs), "weight_scale": _E8M0},
    ),
    Storage(
        "nvfp4",
        {
            "weight_packed": Part(("U8",), _pairs),
            "weight_scale": _E4M3,
            "weight_global_scale": Part(("F32",), _one),
            "input_global_scale": _INPUT,
        },
    ),
    Storage(
        "nvfp4-modelopt",
        {
            "weight": Part(("U8",), _pairs),
            "weight_scale": _E4M3,
            "weight_scale_2": Part(("F32",), _one),
            "input_scale": _INPUT,
        },
    ),
    Storage("mxfp8", {"weight": _FP8, "weight_scale": _E8M0}),
    Storage("fp8-channel", {"weight": _FP8, "weight_scale": Part(_SCALES, _channel)}),
    Storage("fp8-block", {"weight": _FP8, "weight_scale": Part(_SCALES, _tiles)}),
    Storage(
        "int8",
        {"weight": Part(("I8",), _whole), "weight_scale": Part(_SCALES, _channel)},
    ),
    Storage(
        "int4-g32",
        {
            "weight_packed": Part(("I32",), _groups(8)),
            "weight_scale": Part(_SCALES, _groups(32)),
            "weight_shape": Part(("I64", "I32"), _two),
        },
    ),
    Storage(
        "int4-g128",
        {
            "weight_packed": Part(("I32",), _groups(8)),
            "weight_scale": Part(_SCALES, _groups(128)),
            "weight_shape": Part(("I64", "I32"), _two),
        },
    ),
)

SUFFIXES = frozenset(suffix for storage in STORAGES for suffix in storage.parts)
"""Every last component that may belong to a stored matrix."""


ABSENT = "none"


def storage_of(parts: Mapping[str, Stored], rows: int, cols: int) -> Storage | None:
    """Return the storage form that fits the tensors beside a module's name, None where none fits.

    Args:
        parts: Dtype and shape by suffix.
        rows: Rows of the weight, `N`.
        cols: Columns of the weight, `K`.
    """
    for storage in STORAGES:
        if next(mismatches(storage, parts, rows, cols), None) is None:
            return storage
    return None


def nearest_storage(parts: Mapping[str, Stored], rows: int, cols: int) -> Storage:
    """Return the storage form that explains the tensors best, for messages.

    A part that is absent speaks less against a form than a part that is there and does not fit.
    """

    def against(storage: Storage) -> tuple[int, int]:
        found = [got for _, _, got in mismatches(storage, parts, rows, cols)]
        return len(found) - found.count(ABSENT), found.count(ABSENT)

    return min(STORAGES, key=against)


def mismatches(
    storage: Storage, parts: Mapping[str, Stored], rows: int, cols: int
) -> Iterator[tuple[str, str, str]]:
    """Yield suffix, expected and got for each way in which tensors do not fit a storage form."""
    for suffix, part in storage.parts.items():
        stored = parts.get(suffix)
        if stored is None:
            if not part.optional:
                yield suffix, f"a tensor {suffix}", ABSENT
            continue
        dtype, shape = stored
        if dtype not in part.dtypes:
            yield suffix, f"dtype {' or '.join(part.dtypes)}", dtype
        accepted = part.shapes(rows, cols)
        if shape not in accepted:
            yield suffix, f"shape {list(accepted[0])}", str(list(shape))
    for suffix in parts.keys() - storage.parts.keys():
        yield suffix, f"no tensor {suffix}", "one"
