import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.e4m3 import decode_e4m3
from k3quant.formats.e8m0 import MxElement, ScaleRounding, scale_from_amax
from k3quant.formats.mxfp8 import dequantize_mxfp8, quantize_mxfp8

FINITE = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
ROWS = torch.nn.functional.pad(FINITE, (0, 2)).view(-1, 32)


def test_scale_byte_is_an_exponent_not_a_number():
    codes = torch.full((1, 32), 0x38, dtype=torch.uint8)
    got = dequantize_mxfp8(codes, torch.tensor([[117]], dtype=torch.uint8))
    assert got.unique().tolist() == [0.0009765625]


@pytest.mark.parametrize("byte", range(247))
def test_every_code_is_exact_in_float32_under_byte(byte):
    got = dequantize_mxfp8(
        ROWS, torch.full((len(ROWS), 1), byte, dtype=torch.uint8), dtype=torch.float32
    )
    assert torch.equal(got.double(), decode_e4m3(ROWS, torch.float64) * 2.0 ** (byte - 127))


# Scale byte 0 is 2^-126 when torchao divides and 2^-127 when it decodes; huge blocks (29 to 31)
# get scales whose largest values are infinite.
_PEERS = {
    "torchao_floor": (ScaleRounding.FLOOR, {32, 33, 34, 35, 36, 37}),
    "torchao_even": (ScaleRounding.EVEN, {30, 32, 33, 34, 35, 36, 37}),
    "torchao_ceil": (ScaleRounding.CEIL, {29, 30, 31, 33, 34, 35, 36, 37}),
    # Row 17 is one float above 7: amax / 448 rounds down to a power of two there, so the block
    # saturates under a rule that promises it never does.
    "torchao_rceil": (ScaleRounding.RCEIL, {17, 29, 30, 32, 33, 34, 35, 36, 37}),
    "modelopt": (ScaleRounding.RCEIL, {17, 29, 30}),
}


@pytest.mark.parametrize("peer", _PEERS)
def test_golden_rows_agree_with(golden, peer):
    rounding, wrong = _PEERS[peer]
    rows = [row for row in range(52) if row not in wrong]
    codes, scale = quantize_mxfp8(golden["mxfp8.x_f32"][rows], rounding)
    assert torch.equal(scale, golden[f"mxfp8.{peer}.scale"][rows])
    assert torch.equal(codes, golden[f"mxfp8.{peer}.codes"][rows])
    back = dequantize_mxfp8(codes, scale, dtype=torch.float32)
    assert torch.equal(back, golden[f"mxfp8.{peer}.deq"][rows])


def test_golden_scales_agree_with_compressed_tensors_one_bit_rule(golden):
    # It rounds amax to one mantissa bit for eight-bit elements too; 29 and 30 overflow there.
    rows = [row for row in range(52) if row not in {29, 30}]
    element = MxElement(name="e4m3", max_exponent=8, max_mantissa=1.75, mantissa_bits=1)
    amax = golden["mxfp8.x_f32"][rows].abs().amax(dim=-1, keepdim=True)
    got = scale_from_amax(amax, ScaleRounding.EVEN, element=element)
    assert torch.equal(got, golden["mxfp8.compressed_tensors.scale"][rows])


@pytest.mark.parametrize("rounding", ScaleRounding)
def test_huge_rows_stay_finite(golden, rounding):
    source = golden["mxfp8.x_f32"][29:32]
    codes, scale = quantize_mxfp8(source, rounding)
    back = dequantize_mxfp8(codes, scale, dtype=torch.float32)
    assert scale.flatten().tolist() == [246, 246, 246]
    assert float((back / source)[source.abs() > 1e38].min()) > 0.87


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("row", range(32, 39), ids=lambda row: f"row-{row}")
def test_tiny_rows_come_back_within_half_a_step(golden, row, rounding):
    source = golden["mxfp8.x_f32"][row][None]
    codes, scale = quantize_mxfp8(source, rounding)
    back = dequantize_mxfp8(codes, scale, dtype=torch.float32)
    # Half a step is 2^-4 of the value and at least half the smallest subnormal.
    bound = (source.double().abs() / 16).clamp(min=2.0 ** (int(scale) - 127 - 10))
    assert bool(((back - source).double().abs() <= bound).all())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_error_is_at_most_half_a_step_under_rceil(values):
    weight = torch.tensor([values])
    codes, scale = quantize_mxfp8(weight, ScaleRounding.RCEIL)
    back = dequantize_mxfp8(codes, scale, dtype=torch.float32)
    bound = (weight.double().abs() / 16).clamp(min=2.0 ** (int(scale) - 127 - 10))
    assert bool(((back - weight).double().abs() <= bound).all())


def test_zero_block_is_zero_with_its_signs():
    weight = torch.tensor([0.0, -0.0]).repeat(1, 16)
    codes, scale = quantize_mxfp8(weight, ScaleRounding.RCEIL)
    assert scale.tolist() == [[0]]
    assert codes.tolist() == [[0, 0x80] * 16]


@pytest.mark.parametrize(
    ("code", "byte", "message"),
    [
        (0x7F, 127, r"element \[1, 40\]: .* E4M3 NaN"),
        (0x38, 255, r"row 1, block 1: .* got 255"),
        (0x7E, 250, r"row 1, block 1: .* bfloat16 holds, got infinity under scale 250"),
    ],
    ids=["nan-code", "nan-scale", "overflow"],
)
def test_damaged_blocks_are_refused_by_place(code, byte, message):
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    codes[1, 40], scale[1, 1] = code, byte
    with pytest.raises(ValuesError, match=message):
        dequantize_mxfp8(codes, scale)


def test_scale_grid_that_would_broadcast_is_refused():
    with pytest.raises(SchemaError, match=r"expected \[4, 2\], got \[4, 1\]"):
        dequantize_mxfp8(
            torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
        )


def test_columns_that_are_no_multiple_of_32_are_refused():
    with pytest.raises(SchemaError, match="multiple of 32, got 48"):
        quantize_mxfp8(torch.zeros(2, 48), ScaleRounding.RCEIL)
