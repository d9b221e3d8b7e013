"""How far E2M1 codes can move by powers of two: the arithmetic that proves casts exact.

An MXFP4 block of exponent k = byte - 127 is unchanged under a new scale 2^e when each of its codes
times 2^(k - e) is a code again. With d = 0.5 * 2^k as unit the values are the integers
0, 1, 2, 3, 4, 6, 8, 12, so everything here is exact integer arithmetic.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

DOUBLED_VALUES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of codes 0..7."""

MAX_SHIFT = 3
"""No code but zero stays a code under more octaves than this: 0.5 * 2^3 = 4."""

E4M3_SCALE_EXPONENTS = (-9, 8)
"""The powers of two that E4M3 holds, from its smallest subnormal to 256."""


@cache
def shift_range(magnitude: int) -> tuple[int, int]:
    """Return the fewest and the most octaves by which a code stays a code.

    Args:
        magnitude: Code without sign, 0..7. Zero stays under any shift; it reports the full range.
    """
    fits = [s for s in range(-MAX_SHIFT, MAX_SHIFT + 1) if shifted_code(magnitude, s) is not None]
    assert fits == list(range(fits[0], fits[-1] + 1))
    return fits[0], fits[-1]


def shifted_code(magnitude: int, shift: int) -> int | None:
    """Return the code of 2^shift times the value of a code, None where there is none."""
    eighths = DOUBLED_VALUES[magnitude] << (MAX_SHIFT + shift)
    value, rest = divmod(eighths, 1 << MAX_SHIFT)
    return DOUBLED_VALUES.index(value) if not rest and value in DOUBLED_VALUES else None


@cache
def e4m3_range(magnitude: int) -> tuple[int, int]:
    """Return the fewest and the most octaves by which a code's value is an E4M3 value.

    Args:
        magnitude: Code without sign, 1..7.
    """
    values = set(_e4m3_values())
    fits = [octaves for octaves in range(-16, 17) if _value(magnitude, octaves) in values]
    assert fits == list(range(fits[0], fits[-1] + 1))
    return fits[0], fits[-1]


def nearest_e4m3(magnitude: int, octaves: int) -> int:
    """Return the E4M3 byte nearest to a code's value times 2^octaves, ties to even.

    Args:
        magnitude: Code without sign, 0..7.
        octaves: -20 or more; beyond 448 the result is 0x7E.
    """
    value, values = _value(magnitude, octaves), _e4m3_values()
    return min(range(len(values)), key=lambda byte: (abs(values[byte] - value), byte & 1))


# Values of both formats are compared as integers in units of 2^-24.
_UNIT_EXPONENT = -24


def _value(magnitude: int, octaves: int) -> int:
    return DOUBLED_VALUES[magnitude] << (octaves - 1 - _UNIT_EXPONENT)


@cache
def _e4m3_values() -> tuple[int, ...]:
    """Return the value of each E4M3 byte from 0 to 0x7E."""
    values = []
    for byte in range(0x7F):
        field, mantissa = byte >> 3, byte & 7
        significand = mantissa + 8 if field else mantissa
        values.append(significand << (max(field, 1) - 10 - _UNIT_EXPONENT))
    return tuple(values)


@cache
def shift_table() -> Mapping[int, npt.NDArray[np.uint8]]:
    """Return by shift, -3..3, the new packed byte of every packed byte.

    A nibble that has no code there becomes 0; callers shift only what `shift_range` allows.
    """
    tables = {}
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        nibble = np.array(
            [(shifted_code(code & 7, shift) or 0) | (code & 8) for code in range(16)], np.uint8
        )
        byte = np.arange(256)
        tables[shift] = nibble[byte & 0xF] | (nibble[byte >> 4] << 4)
    return MappingProxyType(tables)


def e4m3_power(exponent: int) -> int:
    """Return the E4M3 byte of 2^exponent, -9..8."""
    return (exponent + 7) << 3 if exponent >= -6 else 1 << (exponent + 9)


@cache
def magnitude_marks() -> npt.NDArray[np.uint8]:
    """Return by packed byte a set of its two magnitudes, bit m for magnitude m, `[256]`."""
    byte = np.arange(256)
    marks: npt.NDArray[np.int64] = (1 << (byte & 7)) | (1 << ((byte >> 4) & 7))
    return marks.astype(np.uint8)


def members(marks: int) -> list[int]:
    """Return the magnitudes of a set."""
    return [magnitude for magnitude in range(8) if marks >> magnitude & 1]
