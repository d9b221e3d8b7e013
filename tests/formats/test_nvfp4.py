import math

import pytest
import torch

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.e2m1 import decode_e2m1, unpack_nibbles
from k3quant.formats.e4m3 import decode_e4m3
from k3quant.formats.nvfp4 import (
    GlobalConvention,
    GlobalScale,
    check_group_scales,
    dequantize_nvfp4,
    global_scale_of_amax,
    global_scale_of_exponent,
    quantize_nvfp4,
)

DIVISOR, MULTIPLIER = GlobalConvention.DIVISOR, GlobalConvention.MULTIPLIER


@pytest.mark.parametrize(
    ("convention", "value"),
    [(DIVISOR, 448.0), (MULTIPLIER, float(torch.tensor(0.002232142857142857)))],
    ids=["divisor", "multiplier"],
)
def test_amax_6_comes_back_as_6(convention, value):
    weight = torch.zeros(1, 16)
    weight[0, 0], weight[0, 1] = 6.0, -1.0
    scale = global_scale_of_amax(6.0, convention)
    assert scale == GlobalScale(value=value, convention=convention)
    back = dequantize_nvfp4(*quantize_nvfp4(weight, scale), scale, dtype=torch.float32)
    assert back[0, :2].tolist() == pytest.approx([6.0, -1.0], rel=2**-22)


@pytest.mark.parametrize("kind", ["random", "tiny"])
@pytest.mark.parametrize(
    ("peer", "convention", "stored"),
    [
        ("compressed_tensors", DIVISOR, "global_scale"),
        ("modelopt", MULTIPLIER, "double_scale"),
        ("torchao", MULTIPLIER, "per_tensor_scale"),
    ],
    ids=["compressed-tensors", "modelopt", "torchao"],
)
def test_golden_tensors_agree_with(golden, kind, peer, convention, stored):
    weight, key = golden[f"nvfp4.{kind}.x_f32"], f"nvfp4.{kind}.{peer}"
    scale = global_scale_of_amax(float(weight.abs().max()), convention)
    packed, scale_e4m3 = quantize_nvfp4(weight, scale)
    assert scale.value == float(golden[f"{key}.{stored}"])
    assert torch.equal(scale_e4m3, golden[f"{key}.scale_e4m3"])
    ours, theirs = (decode_e2m1(unpack_nibbles(p)) for p in (packed, golden[f"{key}.packed"]))
    assert torch.equal(ours, theirs)  # by value: compressed-tensors and modelopt write -0 as +0


@pytest.mark.parametrize("kind", ["random", "tiny", "adversarial"])
@pytest.mark.parametrize(
    ("peer", "convention", "stored", "dtype"),
    [
        ("compressed_tensors", DIVISOR, "global_scale", torch.bfloat16),
        ("modelopt", MULTIPLIER, "double_scale", torch.float32),
    ],
    ids=["compressed-tensors", "modelopt"],
)
def test_golden_bytes_decode_as_in(golden, kind, peer, convention, stored, dtype):
    # torchao multiplies by the tensor scale last, which rounds otherwise in the last bit.
    key = f"nvfp4.{kind}.{peer}"
    scale = GlobalScale(value=float(golden[f"{key}.{stored}"]), convention=convention)
    got = dequantize_nvfp4(golden[f"{key}.packed"], golden[f"{key}.scale_e4m3"], scale, dtype=dtype)
    assert torch.equal(got.float(), golden[f"{key}.deq"])


def test_golden_adversarial_agrees_with_modelopt_but_for_zero_signs(golden):
    # The others floor an underflowing group scale elsewhere (0.125 and 2^-6), losing the group.
    weight, key = golden["nvfp4.adversarial.x_f32"], "nvfp4.adversarial.modelopt"
    scale = global_scale_of_amax(float(weight.abs().max()), MULTIPLIER)
    packed, scale_e4m3 = quantize_nvfp4(weight, scale)
    assert torch.equal(scale_e4m3, golden[f"{key}.scale_e4m3"])
    ours, theirs = (decode_e2m1(unpack_nibbles(p)) for p in (packed, golden[f"{key}.packed"]))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("convention", GlobalConvention)
def test_zero_group_has_scale_one_and_zero_codes(convention):
    weight = torch.zeros(1, 32)
    weight[0, 5] = 6.0
    scale = global_scale_of_amax(6.0, convention)
    packed, scale_e4m3 = quantize_nvfp4(weight, scale)
    assert scale_e4m3.tolist() == [[0x7E, 0x38]]
    assert packed[0, 8:].tolist() == [0] * 8
    assert float(dequantize_nvfp4(packed, scale_e4m3, scale)[0, 16:].abs().max()) == 0


@pytest.mark.parametrize("convention", GlobalConvention)
def test_all_zero_tensor_has_global_scale_one(convention):
    scale = global_scale_of_amax(0.0, convention)
    assert scale.value == 1.0
    packed, scale_e4m3 = quantize_nvfp4(torch.zeros(64, 64), scale)
    assert torch.equal(dequantize_nvfp4(packed, scale_e4m3, scale).float(), torch.zeros(64, 64))


@pytest.mark.parametrize("convention", GlobalConvention)
def test_group_too_small_for_a_scale_gets_the_smallest(convention):
    weight = torch.full((1, 32), 1e-6)
    weight[0, 0] = 6.0
    scale = global_scale_of_amax(6.0, convention)
    assert quantize_nvfp4(weight, scale)[1].tolist() == [[0x7E, 0x01]]


def test_elements_are_divided_by_the_rounded_group_scale():
    # amax 0.9 wants group scale 67.2, E4M3 has 64: 0.73 is 5.11 steps of that and becomes 6, and
    # would be 4.87 steps of the wanted scale and become 4.
    weight = torch.zeros(1, 16)
    weight[0, 0], weight[0, 1] = 0.9, 0.73
    scale = GlobalScale(value=448.0, convention=DIVISOR)
    packed, scale_e4m3 = quantize_nvfp4(weight, scale)
    assert float(decode_e4m3(scale_e4m3)) == 64.0
    assert decode_e2m1(unpack_nibbles(packed))[0, :2].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("convention", GlobalConvention)
@pytest.mark.parametrize(
    "amax", [1e-45, 1e-38, 1e-30, 1e-3, 1e30, 3.4e38], ids=lambda value: f"{value:g}"
)
def test_any_range_comes_back_finite_and_near(convention, amax):
    weight = torch.linspace(-1, 1, 64).view(1, 64) * amax
    scale = global_scale_of_amax(float(weight.abs().max()), convention)
    packed, scale_e4m3 = quantize_nvfp4(weight, scale)
    back = dequantize_nvfp4(packed, scale_e4m3, scale, dtype=torch.float32)
    # Half of E2M1's widest step is a sixth of amax; an E4M3 scale adds 1/16 of the value; below
    # the smallest scales the step is 2^-9 * 2^-117.
    bound = float(weight.abs().max()) * (1 / 6 + 1 / 16) + 2.0**-127
    assert float((back.double() - weight.double()).abs().max()) <= bound


@pytest.mark.parametrize("convention", GlobalConvention)
def test_float32_maximum_does_not_overflow(convention):
    weight = torch.full((1, 16), torch.finfo(torch.float32).max)
    scale = global_scale_of_amax(float(weight[0, 0]), convention)
    back = dequantize_nvfp4(*quantize_nvfp4(weight, scale), scale, dtype=torch.float32)
    assert float(back.min()) > 3.39e38


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, -1.0], ids=str)
@pytest.mark.parametrize("convention", GlobalConvention)
def test_global_scales_that_erase_a_tensor_are_refused(convention, value):
    with pytest.raises(ValuesError, match="global scale: expected a finite positive number"):
        GlobalScale(value=value, convention=convention)


@pytest.mark.parametrize("byte", [0x7F, 0xB8, 0xFF], ids=["nan", "negative", "negative-nan"])
def test_group_scales_that_are_nan_or_negative_are_refused_by_place(byte):
    scale_e4m3 = torch.full((4, 2), 0x38, dtype=torch.uint8)
    scale_e4m3[3, 1] = byte
    with pytest.raises(ValuesError, match=rf"row 3, block 1: .* got 0x{byte:02x}"):
        check_group_scales(scale_e4m3)


@pytest.mark.parametrize(
    ("exponent", "convention", "value"),
    [(-7, MULTIPLIER, 2.0**-7), (-7, DIVISOR, 128.0), (126, DIVISOR, 2.0**-126)],
    ids=["multiplier", "divisor", "end"],
)
def test_exponent_becomes_a_scale(exponent, convention, value):
    assert global_scale_of_exponent(exponent, convention).value == value


def test_exponent_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"expected -126\.\.126, got -127"):
        global_scale_of_exponent(-127, DIVISOR)


def test_scale_grid_that_would_broadcast_is_refused():
    scale = global_scale_of_amax(1.0, DIVISOR)
    with pytest.raises(SchemaError, match=r"expected \[4, 4\], got \[4, 1\]"):
        dequantize_nvfp4(
            torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), scale
        )


def test_overflow_is_refused():
    scale = GlobalScale(value=2.0**126, convention=MULTIPLIER)
    packed = torch.full((1, 8), 0x77, dtype=torch.uint8)
    with pytest.raises(ValuesError, match=r"row 0, block 0: .* got infinity under scale 126"):
        dequantize_nvfp4(packed, torch.tensor([[0x7E]], dtype=torch.uint8), scale)
