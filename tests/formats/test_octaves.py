import pytest
import torch

from k3quant.formats.e2m1 import E2M1_VALUES, unpack_nibbles
from k3quant.formats.e4m3 import decode_e4m3
from k3quant.formats.octaves import (
    DOUBLED_VALUES,
    E4M3_SCALE_EXPONENTS,
    MAX_SHIFT,
    e4m3_power,
    e4m3_range,
    shift_range,
    shift_table,
    shifted_code,
)

MAGNITUDES = E2M1_VALUES[:8]
E4M3_VALUES = set(
    decode_e4m3(torch.arange(127, dtype=torch.int32).to(torch.uint8), torch.float64).tolist()
)


def test_doubled_values_are_twice_the_codes():
    assert [value * 2 for value in MAGNITUDES] == list(DOUBLED_VALUES)


@pytest.mark.parametrize("shift", range(-MAX_SHIFT - 1, MAX_SHIFT + 2))
@pytest.mark.parametrize("magnitude", range(1, 8))
def test_shift_range_is_exactly_where_the_value_is_a_code(magnitude, shift):
    low, high = shift_range(magnitude)
    assert (low <= shift <= high) == (MAGNITUDES[magnitude] * 2.0**shift in MAGNITUDES)


@pytest.mark.parametrize("shift", range(-MAX_SHIFT, MAX_SHIFT + 1))
@pytest.mark.parametrize("magnitude", range(8))
def test_shifted_code_has_the_shifted_value(magnitude, shift):
    code = shifted_code(magnitude, shift)
    value = MAGNITUDES[magnitude] * 2.0**shift
    assert (code is None and value not in MAGNITUDES) or MAGNITUDES[code] == value


@pytest.mark.parametrize("octaves", range(-18, 19))
@pytest.mark.parametrize("magnitude", range(1, 8))
def test_e4m3_range_is_exactly_where_the_value_is_e4m3(magnitude, octaves):
    low, high = e4m3_range(magnitude)
    assert (low <= octaves <= high) == (MAGNITUDES[magnitude] * 2.0**octaves in E4M3_VALUES)


@pytest.mark.parametrize("exponent", range(-9, 9))
def test_e4m3_power_is_the_byte_of_a_power_of_two(exponent):
    assert float(decode_e4m3(torch.tensor(e4m3_power(exponent)))) == 2.0**exponent


def test_e4m3_has_no_further_powers_of_two():
    low, high = E4M3_SCALE_EXPONENTS
    assert 2.0 ** (low - 1) not in E4M3_VALUES
    assert 2.0 ** (high + 1) not in E4M3_VALUES


@pytest.mark.parametrize("shift", range(-MAX_SHIFT, MAX_SHIFT + 1))
def test_shift_table_moves_both_nibbles_and_keeps_signs(shift):
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    moved = unpack_nibbles(torch.from_numpy(shift_table()[shift].copy()))
    before = unpack_nibbles(byte)
    assert torch.equal(moved & 8, before & 8)
    fits = torch.tensor([shifted_code(code, shift) is not None for code in range(8)])
    values = torch.tensor(MAGNITUDES, dtype=torch.float64)
    kept = fits[(before & 7).int()]
    assert torch.equal(
        values[(moved & 7).int()][kept], (values[(before & 7).int()] * 2.0**shift)[kept]
    )
