"""E2M1, the 4-bit float: one sign, two exponent, one mantissa bit; no infinity, no NaN.

A code is an integer 0..15, a packed byte holds two codes, the even column in the low nibble.
Example: 1.5 is code 3, -6.0 is code 15; columns [1.5, -6.0] pack to 0xF3.
"""

import torch
from torch import Tensor

from k3quant.formats.mx import (
    E2M1_MAX,
    E2M1_MIDPOINTS,
    E2M1_SIGN,
    E2M1_TIE_ROUNDS_UP,
    E2M1_VALUES,
)

__all__ = [
    "E2M1_MAX",
    "E2M1_SIGN",
    "E2M1_VALUES",
    "decode_e2m1",
    "encode_e2m1",
    "pack_nibbles",
    "unpack_nibbles",
]


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look codes up in the table of 16 values.

    Args:
        codes: Any shape, uint8, each 0..15.
        dtype: Floating dtype of the result; every value is exact in all of them.

    Returns:
        Values in the shape of `codes`; code 8 gives -0.0.
    """
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
    return table[codes.int()]


def encode_e2m1(values: Tensor, *, nan_code: int | None = None) -> Tensor:
    """Round values to the nearest E2M1 code, ties to the even code.

    Args:
        values: Any shape, any floating dtype.
        nan_code: Code that stands for NaN; None refuses NaN.

    Returns:
        uint8 codes in the shape of `values`. Magnitudes above 6, infinity included, become 6; the
        sign of a zero, and of what rounds to zero, stays.

    Raises:
        ValueError: A value is NaN and `nan_code` is None.
    """
    magnitude = values.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, ties_up in zip(E2M1_MIDPOINTS, E2M1_TIE_ROUNDS_UP, strict=True):
        codes += magnitude >= midpoint if ties_up else magnitude > midpoint
    codes += torch.signbit(values).to(torch.uint8) * E2M1_SIGN
    nan = torch.isnan(values)
    if nan_code is not None:
        return codes.masked_fill_(nan, nan_code)
    if bool(nan.any()):
        raise ValueError(f"e2m1: expected numbers, got {int(nan.sum())} NaN")
    return codes


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack pairs of codes into bytes, the even column in the low nibble.

    Args:
        codes: `[..., cols]` uint8, each 0..15, an even number of columns.

    Returns:
        `[..., cols / 2]` uint8.

    Raises:
        ValueError: The number of columns is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"columns: expected an even number, got {codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Split bytes into codes, the low nibble first.

    Args:
        packed: `[..., cols / 2]` uint8.

    Returns:
        `[..., cols]` uint8 codes.
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
