"""Decoding a stored matrix, whatever its storage form, into floats."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.fp8_block import dequantize_fp8_block
from k3quant.formats.fp8_channel import dequantize_fp8_channel
from k3quant.formats.int4 import dequantize_int4
from k3quant.formats.int8_channel import dequantize_int8_channel
from k3quant.formats.mxfp4 import dequantize_mxfp4
from k3quant.formats.mxfp8 import dequantize_mxfp8
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale, dequantize_nvfp4

Parts = Mapping[str, Tensor]
"""Stored tensors by suffix; E4M3, E8M0 and packed nibbles as uint8, floats in their own dtype."""

Decoder = Callable[[Parts, int, int, torch.dtype], Tensor]


def decode_matrix(
    storage: str, parts: Parts, shape: tuple[int, int], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode a stored matrix.

    Args:
        storage: Name of the storage form, as `storage_of` gives it.
        parts: Its tensors, by suffix.
        shape: Rows and columns of the weight.
        dtype: Floating dtype of the result.

    Returns:
        `[rows, cols]` in `dtype`.

    Raises:
        SchemaError: The storage form is unknown, or the parts do not fit it.
        ValuesError: A scale cannot be right, or a value overflows `dtype`.
    """
    decoder = _DECODERS.get(storage)
    if decoder is None:
        raise SchemaError(f"storage: expected one of {sorted(_DECODERS)}, got `{storage}`")
    return decoder(parts, *shape, dtype)


def _nvfp4(parts: Parts, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    scale = GlobalScale(
        value=float(parts["weight_global_scale"].flatten()[0]),
        convention=GlobalConvention.DIVISOR,
    )
    return dequantize_nvfp4(parts["weight_packed"], parts["weight_scale"], scale, dtype=dtype)


def _nvfp4_modelopt(parts: Parts, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    scale = GlobalScale(
        value=float(parts["weight_scale_2"].flatten()[0]), convention=GlobalConvention.MULTIPLIER
    )
    return dequantize_nvfp4(parts["weight"], parts["weight_scale"], scale, dtype=dtype)


def _fp8_block(parts: Parts, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    grid = parts["weight_scale"].float().reshape(-(-rows // 128), -(-cols // 128))
    return dequantize_fp8_block(parts["weight"], grid, dtype=dtype)


def _int4(group_size: int) -> Decoder:
    def decode(parts: Parts, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return dequantize_int4(
            parts["weight_packed"],
            parts["weight_scale"],
            cols=cols,
            group_size=group_size,
            dtype=dtype,
        )

    return decode


_DECODERS: Mapping[str, Decoder] = {
    "mxfp4": lambda p, n, k, t: dequantize_mxfp4(p["weight_packed"], p["weight_scale"], dtype=t),
    "nvfp4": _nvfp4,
    "nvfp4-modelopt": _nvfp4_modelopt,
    "mxfp8": lambda p, n, k, t: dequantize_mxfp8(p["weight"], p["weight_scale"], dtype=t),
    "fp8-channel": lambda p, n, k, t: dequantize_fp8_channel(
        p["weight"], p["weight_scale"].float().reshape(n, 1), dtype=t
    ),
    "fp8-block": _fp8_block,
    "int8": lambda p, n, k, t: dequantize_int8_channel(
        p["weight"], p["weight_scale"].float().reshape(n, 1), dtype=t
    ),
    "int4-g32": _int4(32),
    "int4-g128": _int4(128),
}
