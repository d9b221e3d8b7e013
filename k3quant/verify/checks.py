"""Which value check each tensor of a checkpoint gets."""

from k3quant.checkpoint.header import Header
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import shard_tensors
from k3quant.verify.stream import Span
from k3quant.verify.values import ValueCheck

_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_SCALARS = frozenset({"weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale"})


def padded_tensors(k3: K3Config) -> dict[str, int]:
    """Return the tensors that are zero-padded, with how many leading elements count."""
    heads = k3.kda.num_heads
    return {
        spec.name: heads
        for shard in range(1, k3.num_hidden_layers + 1)
        for spec in shard_tensors(k3, shard, packed=False)
        if spec.role == "kda.A_log"
    }


def spans_of(header: Header, padded: dict[str, int]) -> list[Span]:
    """Return the tensors of a shard with their checks, in file order.

    Args:
        header: The shard's header.
        padded: Zero-padded tensors by name, with how many elements count.
    """
    start = header.data_start
    spans = [
        Span(
            start + entry.begin,
            start + entry.end,
            value_check(name, entry.dtype, entry.shape, padded.get(name)),
        )
        for name, entry in header.tensors.items()
        if entry.end > entry.begin
    ]
    return sorted(spans, key=lambda span: span.begin)


def value_check(name: str, dtype: str, shape: tuple[int, ...], live: int | None) -> ValueCheck:
    """Return the check that a tensor's name and dtype ask for."""
    suffix = name.rpartition(".")[2]
    kind = "bytes"
    if live is not None and dtype in _FLOATS:
        kind = "padded" if shape and shape[-1] > live else "float"
    elif suffix in _SCALARS and dtype == "F32":
        kind = "positive-scale"
    elif suffix == "weight_scale":
        kind = _scale_kind(dtype)
    elif (suffix == "weight_packed" or suffix == "weight") and dtype == "U8" and len(shape) == 2:
        kind = "packed"
    elif dtype in _FLOATS:
        kind = "float"
    elif dtype == "F8_E4M3":
        kind = "e4m3"
    return ValueCheck(name=name, kind=kind, dtype=dtype, shape=shape, live=live)


def _scale_kind(dtype: str) -> str:
    if dtype in {"U8", "F8_E8M0"}:
        return "e8m0"
    if dtype == "F8_E4M3":
        return "e4m3-scale"
    return "positive-scale" if dtype in _FLOATS else "bytes"
