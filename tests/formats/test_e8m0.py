import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import ValuesError
from k3quant.formats.e8m0 import (
    E2M1_ELEMENT,
    E4M3_ELEMENT,
    MxElement,
    ScaleRounding,
    check_scales,
    decode_e8m0,
    encode_e8m0,
    scale_from_amax,
    two_to,
)

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def byte_of(amax: float, rounding: ScaleRounding, element: MxElement = E2M1_ELEMENT) -> int:
    return int(scale_from_amax(torch.tensor(amax), rounding, element=element))


def exact_byte(amax: float, rounding: ScaleRounding, element: MxElement) -> int:
    """The rules as they are written, in Python's exact float64 arithmetic."""
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)
    mantissa, exponent = mantissa * 2, exponent - 1
    up = {
        ScaleRounding.FLOOR: False,
        ScaleRounding.CEIL: mantissa > 1,
        ScaleRounding.EVEN: mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1),
        ScaleRounding.RCEIL: mantissa > element.max_mantissa,
    }[rounding]
    return max(0, min(exponent + up - element.max_exponent + 127, element.max_scale))


@pytest.mark.parametrize("byte", range(255))
def test_byte_is_a_power_of_two(byte):
    got = decode_e8m0(BYTES[byte])
    assert got.dtype == torch.float32
    assert float(got) == 2.0 ** (byte - 127)


def test_byte_255_is_nan():
    assert math.isnan(float(decode_e8m0(BYTES[255])))


def test_byte_0_is_the_subnormal_and_exact_in_bfloat16():
    assert float(decode_e8m0(BYTES[0])) == 5.877471754111438e-39
    assert float(decode_e8m0(BYTES[0]).bfloat16()) == 5.877471754111438e-39


@pytest.mark.parametrize("peer", ["torch", "torchao"])
def test_decode_agrees_with(golden, peer):
    theirs = golden[f"e8m0_decode.{peer}"]
    assert torch.equal(decode_e8m0(BYTES)[:255], theirs[:255])
    assert math.isnan(float(theirs[255]))


def test_decode_agrees_with_compressed_tensors_but_for_nan(golden):
    # There byte 255 becomes infinity.
    assert torch.equal(decode_e8m0(BYTES)[:255], golden["e8m0_decode.compressed_tensors"][:255])


def test_every_byte_round_trips():
    assert torch.equal(encode_e8m0(decode_e8m0(BYTES)), BYTES)


@pytest.mark.parametrize(
    "scale",
    [3.0, -1.0, 0.0, 2.0**-128, math.inf, 1.0000001],
    ids=["three", "negative", "zero", "too-small", "infinity", "one-ulp-off"],
)
def test_encode_refuses_what_is_no_scale(scale):
    with pytest.raises(ValueError, match="power of two"):
        encode_e8m0(torch.tensor([1.0, scale]))


@pytest.mark.parametrize(
    ("amax", "floor", "ceil", "even", "rceil"),
    [
        (0.0, 0, 0, 0, 0),
        (4.0, 127, 127, 127, 127),
        (4.000000476837158, 127, 128, 127, 127),
        (6.0, 127, 128, 127, 127),
        (6.000000476837158, 127, 128, 127, 128),
        (6.5, 127, 128, 127, 128),
        (6.999999523162842, 127, 128, 127, 128),
        (7.0, 127, 128, 128, 128),
        (7.5, 127, 128, 128, 128),
        (8.0, 128, 128, 128, 128),
        (3.5, 126, 127, 127, 127),
    ],
    ids=lambda value: f"{value:g}",
)
def test_rules_for_e2m1(amax, floor, ceil, even, rceil):
    got = [byte_of(amax, rounding) for rounding in ("floor", "ceil", "even", "rceil")]
    assert got == [floor, ceil, even, rceil]


@pytest.mark.parametrize(
    ("amax", "floor", "ceil", "even", "rceil"),
    [
        (256.0, 127, 127, 127, 127),
        (448.0, 127, 128, 127, 127),
        (449.0, 127, 128, 127, 128),
        (495.0, 127, 128, 127, 128),
        (496.0, 127, 128, 128, 128),
    ],
    ids=lambda value: f"{value:g}",
)
def test_rules_for_e4m3(amax, floor, ceil, even, rceil):
    rules = ("floor", "ceil", "even", "rceil")
    assert [byte_of(amax, rule, E4M3_ELEMENT) for rule in rules] == [floor, ceil, even, rceil]


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("element", [E2M1_ELEMENT, E4M3_ELEMENT], ids=lambda e: e.name)
@pytest.mark.parametrize(
    "amax", [2.0**127, 3e38, torch.finfo(torch.float32).max], ids=["power", "3e38", "largest"]
)
def test_huge_blocks_stay_finite(amax, rounding, element):
    byte = byte_of(amax, rounding, element)
    largest = element.max_mantissa * 2.0**element.max_exponent
    assert largest * 2.0 ** (byte - 127) <= torch.finfo(torch.float32).max
    assert largest * 2.0 ** (byte - 127) >= amax / 2


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize(
    "amax", [2.0**-149, 2.0**-130, 3 * 2.0**-127], ids=["smallest", "subnormal", "below-range"]
)
def test_tiny_blocks_take_byte_0(amax, rounding):
    assert byte_of(amax, rounding) == 0


@given(st.floats(0, width=32, allow_infinity=False, exclude_min=False))
def test_rules_hold_for_every_float32(amax):
    tensor = torch.tensor(abs(amax))
    got = {
        (rounding, element.name): int(scale_from_amax(tensor, rounding, element=element))
        for rounding in ScaleRounding
        for element in (E2M1_ELEMENT, E4M3_ELEMENT)
    }
    expected = {
        (rounding, element.name): exact_byte(abs(amax), rounding, element)
        for rounding in ScaleRounding
        for element in (E2M1_ELEMENT, E4M3_ELEMENT)
    }
    assert got == expected


@pytest.mark.parametrize("amax", [-1.0, math.nan, math.inf], ids=["negative", "nan", "infinity"])
def test_amax_that_is_no_magnitude_is_refused(amax):
    with pytest.raises(ValueError, match="finite magnitudes"):
        byte_of(amax, ScaleRounding.FLOOR)


def test_nan_scale_is_refused_by_place():
    scale = torch.full((4, 2), 127, dtype=torch.uint8)
    scale[2, 1] = 255
    with pytest.raises(ValuesError, match=r"row 2, block 1: .* got 255 \(NaN\) in 1 blocks"):
        check_scales(scale)


def test_byte_0_is_no_fault():
    check_scales(torch.zeros(4, 2, dtype=torch.uint8))


@pytest.mark.parametrize("exponent", [-1022, -136, 0, 127, 250, 1023])
def test_two_to_is_exact_in_float64(exponent):
    assert float(two_to(torch.tensor(exponent))) == 2.0**exponent
