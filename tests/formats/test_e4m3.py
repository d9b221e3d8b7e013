import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import ValuesError
from k3quant.formats.e4m3 import Overflow, check_numbers, decode_e4m3, encode_e4m3

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FINITE = [byte for byte in range(256) if byte & 0x7F != 0x7F]
VALUES = sorted({float(v) for v in decode_e4m3(BYTES[FINITE], torch.float64)})


def code(value: float, overflow: Overflow = Overflow.SATURATE) -> int:
    return int(encode_e4m3(torch.tensor(value), overflow=overflow))


@pytest.mark.parametrize("byte", FINITE)
def test_decode_computes_sign_exponent_and_mantissa(byte):
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 0:
        magnitude = mantissa * 2.0**-9
    else:
        magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    got = float(decode_e4m3(BYTES[byte]))
    assert got == (-magnitude if sign else magnitude)
    assert math.copysign(1, got) == (-1 if sign else 1)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_decode_knows_both_nans(byte):
    assert math.isnan(float(decode_e4m3(BYTES[byte])))


def test_decode_agrees_with_torch(golden):
    assert torch.equal(decode_e4m3(BYTES[FINITE]), golden["fp8_e4m3_decode"][FINITE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_byte_round_trips_in(dtype):
    assert torch.equal(encode_e4m3(decode_e4m3(BYTES[FINITE], dtype)), BYTES[FINITE])


@pytest.mark.parametrize(
    ("value", "saturated", "with_nan"),
    [
        (448.0, 0x7E, 0x7E),
        (463.9, 0x7E, 0x7E),
        (464.0, 0x7E, 0x7E),
        (464.1, 0x7E, 0x7F),
        (480.0, 0x7E, 0x7F),
        (1e38, 0x7E, 0x7F),
        (math.inf, 0x7E, 0x7F),
        (-464.1, 0xFE, 0xFF),
        (-math.inf, 0xFE, 0xFF),
    ],
    ids=lambda value: f"{value:g}",
)
def test_beyond_the_range(value, saturated, with_nan):
    assert code(value) == saturated
    assert code(value, Overflow.NAN) == with_nan


@pytest.mark.parametrize("nan", [math.nan, -math.nan], ids=["nan", "negative-nan"])
@pytest.mark.parametrize("overflow", Overflow)
def test_nan_becomes_the_one_nan(nan, overflow):
    assert code(nan, overflow) == 0x7F


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (1.0001 * 2.0**-10, 0x01),
        (3 * 2.0**-10, 0x02),
        (7.5 * 2.0**-9, 0x08),
        (7.4 * 2.0**-9, 0x07),
        (2.0**-149, 0x00),
        (-(2.0**-149), 0x80),
        (-0.0, 0x80),
        (0.0, 0x00),
    ],
    ids=lambda value: f"{value:g}",
)
def test_subnormals_and_zeros(value, expected):
    assert code(value) == expected


@pytest.mark.parametrize("index", range(len(VALUES) - 1))
def test_a_tie_goes_to_the_even_byte(index):
    low, high = VALUES[index], VALUES[index + 1]
    got = code((low + high) / 2)
    assert got % 2 == 0
    assert float(decode_e4m3(torch.tensor(got))) in (low, high)


@given(st.floats(width=32, allow_nan=False))
def test_encode_takes_the_nearest_value(value):
    got = float(decode_e4m3(encode_e4m3(torch.tensor(value))))
    bounded = max(-448.0, min(448.0, value))
    assert abs(got - bounded) == min(abs(other - bounded) for other in VALUES)


def test_torch_agrees_within_the_range():
    generator = torch.Generator().manual_seed(1)
    spread = torch.randint(-16, 9, (1 << 16,), generator=generator).float()
    values = torch.randn(1 << 16, generator=generator) * torch.exp2(spread)
    values = values.clamp(-448, 448)
    theirs = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encode_e4m3(values), theirs)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="got float64"):
        encode_e4m3(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_are_refused_by_place(byte):
    codes = torch.zeros(3, 4, dtype=torch.uint8)
    codes[1, 2] = byte
    with pytest.raises(ValuesError, match=r"element \[1, 2\]: .* NaN in 1 elements"):
        check_numbers(codes)
