import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.int4 import (
    Int4Range,
    dequantize_int4,
    pack_int4,
    quantize_int4,
    unpack_int4,
)

BF16_MANTISSAS = torch.arange(0x3C80, 0x3D00, dtype=torch.int32).to(torch.int16)


def test_word_holds_element_0_lowest_with_8_added():
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[-22444272]]
    assert -22444272 & 0xFFFFFFFF == 0xFEA98710


@pytest.mark.parametrize("cols", [1, 7, 8, 9, 12, 64], ids=lambda cols: f"{cols}-columns")
def test_columns_come_from_the_shape_not_from_the_words(cols):
    codes = torch.randint(-8, 8, (3, cols), dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.shape == (3, -(-cols // 8))
    assert torch.equal(unpack_int4(packed, cols), codes)


def test_words_of_another_width_are_refused():
    with pytest.raises(SchemaError, match="expected 2 a row, got 1"):
        unpack_int4(torch.zeros(3, 1, dtype=torch.int32), 12)


def test_golden_groups_agree_with_compressed_tensors(golden):
    # Row 10 is all zero: there the scale is a float epsilon.
    packed, scale = quantize_int4(golden["int4.x_f32"], group_size=32)
    assert torch.equal(packed, golden["int4.compressed_tensors.f32.packed_int32"])
    assert torch.equal(scale[:10], golden["int4.compressed_tensors.f32.scale"][:10])
    back = dequantize_int4(packed, scale, cols=64, group_size=32, dtype=torch.float32)
    assert torch.equal(back, golden["int4.compressed_tensors.f32.deq"])


def test_golden_groups_agree_with_torchao(golden):
    # Row 8 holds quotients at exact ties: torchao multiplies by the reciprocal of the scale.
    rows = [0, 1, 2, 3, 4, 5, 6, 7, 9]
    packed, scale = quantize_int4(golden["int4.x_f32"][rows], group_size=32)
    assert torch.equal(scale, golden["int4.torchao_symmetric.f32.scale"][rows])
    assert torch.equal(unpack_int4(packed, 64), golden["int4.torchao_symmetric.f32.q_int8"][rows])


def test_golden_bfloat16_scales_agree_and_codes_are_no_worse(golden):
    # compressed-tensors divides in bfloat16 and so rounds twice; 12 of 704 codes differ.
    weight = golden["int4.x_f32"][:10].bfloat16()
    packed, scale = quantize_int4(weight, group_size=32, scale_dtype=torch.bfloat16)
    stored = golden["int4.compressed_tensors.bf16.scale"][:10]
    assert scale.dtype == torch.bfloat16
    assert torch.equal(scale.float(), stored)
    ours = unpack_int4(packed, 64).view(10, 2, 32) * stored[..., None]
    theirs = unpack_int4(golden["int4.compressed_tensors.bf16.packed_int32"][:10], 64)
    exact = weight.float().view(10, 2, 32)
    worse = (ours - exact).abs() > (theirs.view(10, 2, 32) * stored[..., None] - exact).abs()
    assert not bool(worse.any())


def test_golden_balanced_scales_agree_with_modelopt(golden):
    # It stores the multiplier 7 / amax.
    _, scale = quantize_int4(golden["int4.x_f32"][:10], group_size=32, grid=Int4Range.BALANCED)
    theirs = 1 / golden["int4.modelopt.f32.scale_multiplier"]
    assert torch.allclose(scale, theirs, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize(
    ("grid", "codes"),
    [(Int4Range.FULL, [7, -8, 4, 0]), (Int4Range.BALANCED, [7, -7, 4, 0])],
    ids=["full", "balanced"],
)
def test_range_decides_the_ends(grid, codes):
    weight = torch.tensor([[7.0, -7.0, 4.0, 0.0]])
    packed, scale = quantize_int4(weight, group_size=4, grid=grid)
    assert scale.tolist() == [[float(torch.tensor(7.0) / grid.divisor)]]
    assert unpack_int4(packed, 4).tolist() == [codes]


@pytest.mark.parametrize("mantissa", range(128), ids=lambda m: f"mantissa-{m}")
def test_balanced_groups_survive_bfloat16_and_back(mantissa):
    # A Kimi-K2 group: integers -7..7 times a bfloat16 scale, written as bfloat16.
    scale = BF16_MANTISSAS[mantissa].view(torch.bfloat16).view(1, 1)
    codes = torch.arange(-7, 8).repeat(1, 3)[:, :32].to(torch.int8)
    weight = (codes.float() * scale.float()).bfloat16()
    packed, again = quantize_int4(
        weight, group_size=32, grid=Int4Range.BALANCED, scale_dtype=torch.bfloat16
    )
    assert torch.equal(unpack_int4(packed, 32), codes)
    assert torch.equal(again, scale)


def test_zero_group_has_scale_one():
    packed, scale = quantize_int4(torch.zeros(2, 64), group_size=32)
    assert scale.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not bool(unpack_int4(packed, 64).any())


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_half_a_step(values, scale_dtype):
    weight = torch.tensor([values])
    packed, scale = quantize_int4(
        weight, group_size=32, grid=Int4Range.BALANCED, scale_dtype=scale_dtype
    )
    back = dequantize_int4(packed, scale, cols=32, group_size=32, dtype=torch.float32)
    # A bfloat16 scale may be 2^-9 too small for amax, at 7 steps: 0.014 steps more.
    assert float((back - weight).double().abs().max()) <= float(scale.double()) * 0.515


@pytest.mark.parametrize("group_size", [32, 128])
def test_leading_dimensions_are_kept(group_size):
    weight = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(7))
    packed, scale = quantize_int4(weight, group_size=group_size)
    assert packed.shape == (2, 3, 32)
    assert scale.shape == (2, 3, 256 // group_size)
    assert dequantize_int4(packed, scale, cols=256, group_size=group_size).shape == (2, 3, 256)


def test_columns_that_are_no_multiple_of_the_group_are_refused():
    with pytest.raises(SchemaError, match="multiple of 128, got 192"):
        quantize_int4(torch.zeros(2, 192), group_size=128)


def test_scale_grid_that_would_broadcast_is_refused():
    packed = torch.zeros(4, 8, dtype=torch.int32)
    with pytest.raises(SchemaError, match=r"expected \[4, 2\], got \[4, 1\]"):
        dequantize_int4(packed, torch.ones(4, 1), cols=64, group_size=32)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_scales_that_are_not_positive_are_refused(scale):
    packed = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValuesError, match=r"scale \[0, 0\]"):
        dequantize_int4(packed, torch.tensor([[scale]]), cols=32, group_size=32)
