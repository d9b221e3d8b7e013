"""From stored bytes to weights: the one place where an encoding of a weight is undone."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.dtypes import torch_dtype
from k3quant.formats.fast_mxfp4 import dequantize_to_bf16

PLAIN_DTYPES = ("BF16", "F16", "F32")


class StoredPart(NamedTuple):
    """One stored tensor as it was read.

    Attributes:
        name: Full name, for messages.
        dtype: Safetensors dtype.
        shape: Stored shape.
        data: Its bytes, `[n]` uint8, from torch's own allocator: aligned alike every time, so that
            equal weights give equal results to the last bit.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Tensor


def decode_weight(parts: Mapping[str, StoredPart], *, dtype: torch.dtype) -> Tensor:
    """Decode a weight from its stored parts.

    Args:
        parts: By part: `weight`, or `packed` and `scale` of an MXFP4 weight.
        dtype: Dtype of the result.

    Returns:
        The weight in its logical shape. NaN and infinity of plain weights are kept.

    Raises:
        SchemaError: The parts are of no known storage.
        ValuesError: A scale byte is NaN, or a value overflows `dtype`.
    """
    if parts.keys() == {"weight"}:
        plain = parts["weight"]
        if plain.dtype not in PLAIN_DTYPES:
            raise SchemaError(
                f"{plain.name}: expected dtype {', '.join(PLAIN_DTYPES)}, got {plain.dtype}",
                hint="this encoding cannot be evaluated",
            )
        return plain.data.view(torch_dtype(plain.dtype)).reshape(plain.shape).to(dtype)
    if parts.keys() == {"packed", "scale"}:
        return _decode_mxfp4(parts["packed"], parts["scale"]).to(dtype)
    names = ", ".join(part.name for part in parts.values())
    raise SchemaError(f"{names}: expected a plain or an MXFP4 weight, got parts {sorted(parts)}")


def _decode_mxfp4(packed: StoredPart, scale: StoredPart) -> Tensor:
    """Decode to bfloat16, which holds every MXFP4 value exactly."""
    codes, scales = (part.data.numpy().reshape(part.shape) for part in (packed, scale))
    rows, half = packed.shape
    weight = torch.empty((rows, 2 * half), dtype=torch.bfloat16)
    bits = weight.view(torch.uint16).numpy()
    try:
        dequantize_to_bf16(codes, scales, out=bits, threads=torch.get_num_threads())
    except ValuesError as error:
        raise ValuesError(f"{packed.name}: {error.message}", hint=error.hint) from error
    return weight
