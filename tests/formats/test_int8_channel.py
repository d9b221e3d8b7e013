import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.int8_channel import dequantize_int8_channel, quantize_int8_channel


def test_scale_is_amax_over_half_the_span():
    codes, scale = quantize_int8_channel(torch.tensor([[127.5, -127.5, 1.5, 2.5, -0.5]]))
    assert scale.tolist() == [[1.0]]
    assert codes.tolist() == [[127, -128, 2, 2, 0]]  # ties to even, the positive end clips


def test_zero_row_has_scale_one():
    codes, scale = quantize_int8_channel(torch.zeros(2, 4))
    assert scale.tolist() == [[1.0], [1.0]]
    assert not bool(codes.any())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_error_is_at_most_half_a_step(values):
    weight = torch.tensor([values])
    codes, scale = quantize_int8_channel(weight)
    back = dequantize_int8_channel(codes, scale, dtype=torch.float32)
    # The rounding of scale and product may add a little to the half step.
    assert float((back - weight).double().abs().max()) <= float(scale.double()) * 0.5001


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 4)], ids=str)
def test_shapes_are_kept(shape):
    codes, scale = quantize_int8_channel(torch.ones(shape))
    assert codes.shape == shape
    assert scale.shape == (*shape[:-1], 1)
    assert dequantize_int8_channel(codes, scale).shape == shape


def test_values_no_scale_can_hold_are_refused_by_row():
    weight = torch.ones(3, 4)
    weight[2, 1] = float("inf")
    with pytest.raises(ValuesError, match="row 2, block 0: expected finite values"):
        quantize_int8_channel(weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_scales_that_are_not_positive_are_refused(scale):
    with pytest.raises(ValuesError, match=r"scale \[1, 0\]"):
        dequantize_int8_channel(torch.zeros(2, 4, dtype=torch.int8), torch.tensor([[1.0], [scale]]))


def test_scales_of_other_shapes_are_refused():
    with pytest.raises(SchemaError, match=r"scales: expected \[4, 1\], got \[1, 1\]"):
        dequantize_int8_channel(torch.zeros(4, 8, dtype=torch.int8), torch.ones(1, 1))


def test_overflow_is_refused():
    with pytest.raises(ValuesError, match="float16 holds, got infinity under scale 1000"):
        dequantize_int8_channel(
            torch.full((1, 2), 127, dtype=torch.int8),
            torch.tensor([[1000.0]]),
            dtype=torch.float16,
        )
