import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.formats.e2m1 import (
    E2M1_MAX,
    E2M1_VALUES,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)

CODES = torch.arange(16, dtype=torch.uint8)


@pytest.mark.parametrize("code", range(16))
def test_decode_computes_sign_exponent_and_mantissa(code):
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    got = decode_e2m1(CODES[code])
    assert float(got) == (-magnitude if sign else magnitude)
    assert bool(torch.signbit(got)) == bool(sign)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_code_round_trips_in(dtype):
    assert torch.equal(encode_e2m1(decode_e2m1(CODES, dtype)), CODES)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.01, 6.0),
        (7.0, 6.0),
        (-0.25, -0.0),
        (-1.25, -1.0),
    ],
    ids=lambda value: f"{value:g}",
)
def test_ties_go_to_the_even_code(value, expected):
    got = decode_e2m1(encode_e2m1(torch.tensor([value])))
    assert float(got) == expected
    assert math.copysign(1, float(got)) == math.copysign(1, expected)


@pytest.mark.parametrize("midpoint", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
def test_one_float_off_a_midpoint_goes_to_the_near_side(midpoint, sign):
    middle = torch.tensor(midpoint * sign)
    away, towards = middle * 2, torch.tensor(0.0)
    outer = abs(float(decode_e2m1(encode_e2m1(torch.nextafter(middle, away)))))
    inner = abs(float(decode_e2m1(encode_e2m1(torch.nextafter(middle, towards)))))
    assert inner < midpoint < outer
    assert E2M1_VALUES.index(outer) == E2M1_VALUES.index(inner) + 1


@pytest.mark.parametrize("value", [6.5, 1e30, math.inf], ids=["above-six", "huge", "infinity"])
def test_magnitudes_above_six_saturate(value):
    assert decode_e2m1(encode_e2m1(torch.tensor([value, -value]))).tolist() == [6.0, -6.0]


@pytest.mark.parametrize("value", [0.0, 1e-45, 0.1], ids=["zero", "subnormal", "small"])
def test_what_becomes_zero_keeps_its_sign(value):
    assert encode_e2m1(torch.tensor([value, -value])).tolist() == [0, 8]


def test_nan_is_refused():
    with pytest.raises(ValueError, match="got 1 NaN"):
        encode_e2m1(torch.tensor([1.0, math.nan]))


def test_nan_takes_the_code_that_was_asked_for():
    assert encode_e2m1(torch.tensor([1.0, math.nan]), nan_code=7).tolist() == [2, 7]


@given(st.floats(width=32, allow_nan=False))
def test_encode_takes_the_nearest_value(value):
    got = E2M1_VALUES[int(encode_e2m1(torch.tensor(value)))]
    bounded = max(-E2M1_MAX, min(E2M1_MAX, value))
    assert abs(got - bounded) == min(abs(other - bounded) for other in E2M1_VALUES)


@pytest.mark.parametrize(
    "peer", ["compressed_tensors", "torchao", "torchao_unclamped", "modelopt_nvfp4"]
)
def test_peers_that_tie_to_even_agree(golden, peer):
    # modelopt's MXFP4 cast sends 0.75, 1.75 and 3.5 towards zero, so it is not among them; signs
    # of zeros are each peer's own choice.
    got, theirs = encode_e2m1(golden["fp4_round.x"]), golden[f"fp4_round.{peer}.code"]
    assert torch.equal(decode_e2m1(got), decode_e2m1(theirs))


def test_low_nibble_is_the_even_column():
    row = bytes.fromhex("1032547698badcfe")
    codes = unpack_nibbles(torch.tensor(list(row), dtype=torch.uint8))
    assert codes.tolist() == list(range(16))
    assert bytes(pack_nibbles(codes).tolist()) == row


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 0), (0, 8), (8,)], ids=str)
def test_packing_keeps_leading_dimensions(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(unpack_nibbles(packed), codes)


def test_every_byte_survives_unpack_and_pack():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


def test_odd_columns_are_refused():
    with pytest.raises(ValueError, match="even number, got 3"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
