import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.e2m1 import E2M1_VALUES, unpack_nibbles
from k3quant.formats.e8m0 import ScaleRounding
from k3quant.formats.mxfp4 import (
    Fp16Losses,
    count_fp16_losses,
    dequantize_mxfp4,
    limit_of_mxfp4,
    quantize_mxfp4,
)

C01_ROW = torch.tensor(list(bytes.fromhex("1032547698badcfe" * 2)), dtype=torch.uint8)[None]
ONE = torch.tensor([[127]], dtype=torch.uint8)


def block_of(code: int, byte: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One block whose first element has the code, the others zero."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = code
    return packed, torch.tensor([[byte]], dtype=torch.uint8)


def test_nibbles_decode_low_first():
    got = dequantize_mxfp4(C01_ROW, ONE, dtype=torch.float32)
    assert torch.equal(got, torch.tensor([E2M1_VALUES * 2]))
    assert torch.signbit(got).tolist() == [([False] * 8 + [True] * 8) * 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("byte", range(253))
def test_every_code_is_exact_under_byte(byte, dtype):
    got = dequantize_mxfp4(C01_ROW, torch.full((1, 1), byte, dtype=torch.uint8), dtype=dtype)
    exact = torch.tensor([E2M1_VALUES * 2], dtype=torch.float64) * 2.0 ** (byte - 127)
    assert torch.equal(got.double(), exact)
    assert torch.equal(torch.signbit(got), torch.signbit(exact))


@pytest.mark.parametrize("peer", ["compressed_tensors", "torchao"])
def test_decode_agrees_with(golden, peer):
    # Bytes 253 and 254 overflow in the peers' tables and are refused here; 255 is NaN.
    codes = C01_ROW[:, :8].repeat(253, 2)
    scale = torch.arange(253, dtype=torch.int32).to(torch.uint8)[:, None]
    got = dequantize_mxfp4(codes, scale, dtype=torch.float32)
    assert torch.equal(got, golden[f"mxfp4_decode.{peer}"][:253].repeat(1, 2))


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0, 5.877471754111438e-39), (1, 2.0**-126), (254, 2.0**127)],
    ids=["byte-0", "byte-1", "byte-254"],
)
def test_scale_ends(byte, value):
    packed, scale = block_of(2, byte)
    assert float(dequantize_mxfp4(packed, scale)[0, 0]) == value


def test_nan_scale_is_refused_also_over_zero_codes():
    with pytest.raises(ValuesError, match=r"row 0, block 0: .* got 255 \(NaN\) in 1 blocks"):
        dequantize_mxfp4(*block_of(0, 255))


@pytest.mark.parametrize(
    ("code", "byte", "dtype", "fits"),
    [
        (5, 253, torch.bfloat16, True),
        (6, 253, torch.bfloat16, False),
        (15, 253, torch.float32, False),
        (3, 254, torch.float32, True),
        (4, 254, torch.float32, False),
        (7, 140, torch.float16, True),
        (7, 141, torch.float16, False),
    ],
    ids=["3-fits", "4-not", "minus-6-not", "1.5-fits", "2-not", "half-fits", "half-not"],
)
def test_overflow_is_refused_with_row_block_and_byte(code, byte, dtype, fits):
    packed = torch.zeros(2, 3, 32, dtype=torch.uint8)
    scale = torch.full((2, 3, 2), 127, dtype=torch.uint8)
    packed[1, 2, 20], scale[1, 2, 1] = code, byte
    if fits:
        got = float(dequantize_mxfp4(packed, scale, dtype=dtype)[1, 2, 40])
        assert got == E2M1_VALUES[code] * 2.0 ** (byte - 127)
        return
    with pytest.raises(ValuesError, match=rf"row \[1, 2\], block 1: .* under scale {byte}"):
        dequantize_mxfp4(packed, scale, dtype=dtype)


@pytest.mark.parametrize(
    ("byte", "value", "losses"),
    [
        (102, 0.0, Fp16Losses(flushed=1, rounded=0, overflowed=0)),
        (103, 2.0**-24, Fp16Losses(flushed=0, rounded=0, overflowed=0)),
        (112, 2.0**-15, Fp16Losses(flushed=0, rounded=0, overflowed=0)),
        (113, 2.0**-14, Fp16Losses(flushed=0, rounded=0, overflowed=0)),
    ],
    ids=["tie-flushes", "smallest-subnormal", "subnormal", "normal"],
)
def test_float16_keeps_or_flushes_small_scales(byte, value, losses):
    packed, scale = block_of(2, byte)
    assert float(dequantize_mxfp4(packed, scale, dtype=torch.float16)[0, 0]) == value
    assert count_fp16_losses(packed, scale) == losses


def test_float16_losses_tell_rounding_from_overflow():
    packed = torch.cat((block_of(3, 103)[0], block_of(7, 141)[0]))
    scale = torch.tensor([[103], [141]], dtype=torch.uint8)
    assert count_fp16_losses(packed, scale) == Fp16Losses(flushed=0, rounded=1, overflowed=1)


# Rows of the golden table where a peer is wrong or makes another choice.
_HUGE = {29, 30}  # the scale overflows there; here the block saturates
_BYTE_0 = {33, 34, 35, 36}  # divided by one scale, decoded with another; here both are 2^-127
_PEERS = {
    "compressed_tensors": (ScaleRounding.EVEN, _HUGE),
    "torchao_floor": (ScaleRounding.FLOOR, _BYTE_0),
    "torchao_even": (ScaleRounding.EVEN, _HUGE | _BYTE_0),
    # Rows 34 and 35 get byte 1 under CEIL and are right; row 31 gets 253, whose 4 is infinite.
    "torchao_ceil": (ScaleRounding.CEIL, _HUGE | {31, 33, 36}),
    "torchao_rceil": (ScaleRounding.RCEIL, _HUGE | _BYTE_0),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("peer", _PEERS)
def test_golden_rows_agree_with(golden, peer, dtype):
    rounding, wrong = _PEERS[peer]
    rows = [row for row in range(49) if row not in wrong | _HUGE]
    packed, scale = quantize_mxfp4(golden[f"mx.x_{dtype}"][rows], rounding)
    assert torch.equal(scale, golden[f"mxfp4.{peer}.{dtype}.scale"][rows])
    codes, theirs = (
        unpack_nibbles(p) for p in (packed, golden[f"mxfp4.{peer}.{dtype}.packed"][rows])
    )
    if peer == "compressed_tensors":  # it writes -0 as +0
        codes, theirs = codes.masked_fill(codes == 8, 0), theirs.masked_fill(theirs == 8, 0)
    assert torch.equal(codes, theirs)


def test_golden_scales_agree_with_modelopt(golden):
    # Its codes send ties towards zero and every zero to code 8, so only scales compare.
    rows = [row for row in range(49) if row not in _HUGE]
    _, scale = quantize_mxfp4(golden["mx.x_f32"][rows], ScaleRounding.RCEIL)
    assert torch.equal(scale, golden["mxfp4.modelopt.f32.scale"][rows])


@pytest.mark.parametrize("row", [33, 34, 35, 36], ids=lambda row: f"row-{row}")
@pytest.mark.parametrize("rounding", ScaleRounding)
def test_byte_0_rows_come_back_within_half_a_step(golden, row, rounding):
    source = golden["mx.x_f32"][row][None]
    packed, scale = quantize_mxfp4(source, rounding)
    back = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    step = 2.0 ** (int(scale) - 127)
    assert float((back - source).double().abs().max()) <= step


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("row", [29, 30], ids=["3e38", "float32-max"])
def test_huge_rows_saturate_instead_of_being_lost(golden, row, rounding):
    source = golden["mx.x_f32"][row][None]
    packed, scale = quantize_mxfp4(source, rounding)
    back = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    assert int(scale) == 252
    assert bool((back.abs() >= source.abs() * 0.7)[source.abs() > 1e38].all())


@pytest.mark.parametrize(
    ("amax", "rounding", "value", "saturated"),
    [
        (7.0, ScaleRounding.FLOOR, 6.0, 1),
        (7.0, ScaleRounding.CEIL, 8.0, 0),
        (7.0, ScaleRounding.EVEN, 8.0, 0),
        (6.5, ScaleRounding.FLOOR, 6.0, 1),
        (6.5, ScaleRounding.EVEN, 6.0, 1),
        (6.5, ScaleRounding.CEIL, 6.0, 0),
        (6.5, ScaleRounding.RCEIL, 6.0, 0),
    ],
    ids=lambda value: str(value),
)
def test_the_rule_decides_what_saturates(amax, rounding, value, saturated):
    weight = torch.ones(1, 32)
    weight[0, 3] = amax
    packed, scale = quantize_mxfp4(weight, rounding)
    assert float(dequantize_mxfp4(packed, scale)[0, 3]) == value
    assert int((weight.abs() > limit_of_mxfp4(scale)).sum()) == saturated


@pytest.mark.parametrize("rounding", ScaleRounding)
def test_zero_block_stays_zero_with_its_signs(rounding):
    weight = torch.zeros(2, 32)
    weight[1, ::2] = -0.0
    packed, scale = quantize_mxfp4(weight, rounding)
    assert scale.tolist() == [[0], [0]]
    back = dequantize_mxfp4(packed, scale)
    assert torch.equal(back.float(), weight)
    assert torch.equal(torch.signbit(back), torch.signbit(weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "infinity"])
def test_values_no_scale_can_hold_are_refused_by_place(bad):
    weight = torch.zeros(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ValuesError, match="row 1, block 1: expected finite values"):
        quantize_mxfp4(weight, ScaleRounding.EVEN)


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 32), (32,), (0, 32), (3, 0)], ids=str)
def test_leading_dimensions_are_kept(shape):
    weight = torch.randn(shape)
    packed, scale = quantize_mxfp4(weight, ScaleRounding.EVEN)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert dequantize_mxfp4(packed, scale).shape == shape


def test_columns_that_are_no_multiple_of_32_are_refused():
    with pytest.raises(SchemaError, match="columns: expected a multiple of 32, got 48"):
        quantize_mxfp4(torch.zeros(2, 48), ScaleRounding.EVEN)


@pytest.mark.parametrize("grid", [(64, 1), (1, 2), (64, 3), (2,)], ids=str)
def test_scale_grids_that_would_broadcast_are_refused(grid):
    packed = torch.zeros(64, 32, dtype=torch.uint8)
    with pytest.raises(SchemaError, match=r"scale grid: expected \[64, 2\]"):
        dequantize_mxfp4(packed, torch.zeros(grid, dtype=torch.uint8))


def test_packed_columns_that_cut_a_block_are_refused():
    with pytest.raises(SchemaError, match="packed columns: expected a multiple of 16, got 24"):
        dequantize_mxfp4(
            torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
        )


@given(
    st.lists(st.integers(0, 15), min_size=31, max_size=31),
    st.integers(0, 252),
    st.sampled_from(ScaleRounding),
)
def test_quantize_undoes_dequantize(codes, byte, rounding):
    # One element at the maximum pins the scale, except under CEIL, which leaves 6 room above.
    top = 6 if rounding is ScaleRounding.CEIL else 7
    if rounding is ScaleRounding.CEIL:
        codes = [code if code & 7 != 7 else code - 1 for code in codes]
    nibbles = torch.tensor([*codes, top], dtype=torch.uint8)
    packed = (nibbles[0::2] | (nibbles[1::2] << 4))[None]
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    weight = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    again = quantize_mxfp4(weight, rounding)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_error_is_at_most_half_a_step_under_rceil(values):
    weight = torch.tensor([values])
    packed, scale = quantize_mxfp4(weight, ScaleRounding.RCEIL)
    back = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    # The widest step of E2M1 is 2, between 4 and 6.
    assert float((back - weight).double().abs().max()) <= 2.0 ** (int(scale) - 127)
