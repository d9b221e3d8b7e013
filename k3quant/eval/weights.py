"""From stored bytes to weights: the one place where an encoding of a weight is undone."""

from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.dtypes import torch_dtype
from k3quant.formats.fast_mxfp4 import dequantize_to_bf16
from k3quant.schemes.decode import decode_matrix
from k3quant.schemes.storage import storage_of

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
        parts: By stored suffix: `weight` alone, or the tensors of a storage form.
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
    shape = _logical_shape(parts)
    kinds = {suffix: (part.dtype, part.shape) for suffix, part in parts.items()}
    storage = storage_of(kinds, *shape)
    first = next(iter(parts.values())).name
    if storage is None:
        raise SchemaError(f"{first}: expected a known storage form, got parts {sorted(parts)}")
    if storage.name == "mxfp4":
        return _decode_mxfp4(parts["weight_packed"], parts["weight_scale"], dtype)
    tensors = {suffix: _typed(part) for suffix, part in parts.items()}
    try:
        return decode_matrix(storage.name, tensors, shape, dtype=dtype)
    except ValuesError as error:
        raise ValuesError(f"{first}: {error.message}", hint=error.hint) from error


def decode_weights(
    roles: Mapping[str, Mapping[str, StoredPart]],
    *,
    dtype: torch.dtype,
    exact: Container[str] = (),
    where: str,
) -> dict[str, Tensor]:
    """Decode the weights of a layer or of an expert.

    Args:
        roles: Stored parts by role.
        dtype: Dtype of the results.
        exact: Roles that are decoded to float32 whatever `dtype` is.
        where: Place in the model, for messages.

    Raises:
        SchemaError: The parts are of no known storage.
        ValuesError: A scale byte is NaN, or a value overflows; says where.
    """
    try:
        return {
            role: decode_weight(parts, dtype=torch.float32 if role in exact else dtype)
            for role, parts in roles.items()
        }
    except ValuesError as error:
        raise ValuesError(f"{where}: {error.message}", hint=error.hint) from error


def _logical_shape(parts: Mapping[str, StoredPart]) -> tuple[int, int]:
    """Return rows and columns of a stored matrix."""
    if "weight_shape" in parts:
        rows, cols = _typed(parts["weight_shape"]).tolist()
        return rows, cols
    main = parts.get("weight_packed") or parts["weight"]
    rows, cols = main.shape
    return rows, cols * 2 if main.dtype == "U8" else cols


def _typed(part: StoredPart) -> Tensor:
    """View a part as its dtype; eight-bit floats stay bytes, which the formats decode."""
    if part.dtype.startswith("F8"):
        return part.data.reshape(part.shape)
    return part.data.view(torch_dtype(part.dtype)).reshape(part.shape)


def _decode_mxfp4(packed: StoredPart, scale: StoredPart, dtype: torch.dtype) -> Tensor:
    """Decode by way of bfloat16, which holds every MXFP4 value exactly."""
    if packed.data.is_cuda:
        from k3quant.ops import dequantize_mxfp4

        pair = (part.data.reshape(part.shape) for part in (packed, scale))
        return dequantize_mxfp4(*pair, dtype=dtype)
    codes, scales = (part.data.numpy().reshape(part.shape) for part in (packed, scale))
    rows, half = packed.shape
    weight = torch.empty((rows, 2 * half), dtype=torch.bfloat16)
    bits = weight.view(torch.uint16).numpy()
    try:
        dequantize_to_bf16(codes, scales, out=bits, threads=torch.get_num_threads())
    except ValuesError as error:
        raise ValuesError(f"{packed.name}: {error.message}", hint=error.hint) from error
    return weight.to(dtype)
