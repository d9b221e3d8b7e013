import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.error import ErrorSum, weight_error
from k3quant.formats.fast_int8 import Int8Arrays, cast_to_int8, quantize_to_int8
from k3quant.formats.int8_channel import dequantize_int8_channel, quantize_int8_channel
from k3quant.formats.mxfp4 import dequantize_mxfp4

RNG = np.random.default_rng(9)
FINITE = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
FINITE = FINITE[(FINITE & 0x7FFF) < 0x7F00]
SIGNS = (RNG.integers(0, 2, len(FINITE)) << 15).astype(np.uint16)
BF16 = {
    "mixed": RNG.permutation(FINITE)[: 251 * 259].reshape(251, 259),
    "by-value": (np.sort(FINITE & 0x7FFF) | SIGNS)[: 251 * 259].reshape(251, 259),
    "normal": (RNG.standard_normal((70, 999)).astype("f4").view("u4") >> 16).astype("u2"),
    "zero": np.full((13, 5), 0x8000, np.uint16),
    "one-element": np.array([[0xC040]], np.uint16),
}


def mxfp4_weights() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    every = np.tile(np.arange(256, dtype=np.uint8), (253, 1))
    scales = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 16, axis=1)
    packed = RNG.integers(0, 256, (253, 48), dtype=np.uint8)
    # One block's scale runs from far below to far above its neighbours'.
    beside = np.stack([np.full(253, 126), np.arange(253), np.full(253, 120)], axis=1)
    # Codes up to one magnitude only, so that each is the largest of some row.
    tops = (packed & 0x88) | (np.arange(253) % 8 * 0x11)[:, None].astype(np.uint8)
    sparse = packed.copy()
    sparse[:, 16:32] &= 0x88
    return {
        "every-byte": (every, scales),
        "one-scale-moves": (packed, beside.astype(np.uint8)),
        "every-largest": (tops, RNG.integers(0, 253, (253, 3), dtype=np.uint8)),
        "zero-blocks": (sparse, beside.astype(np.uint8)),
        "lowest": (packed, RNG.integers(0, 5, (253, 3), dtype=np.uint8)),
        "zero": (packed & 0x88, beside.astype(np.uint8)),
    }


MXFP4 = mxfp4_weights()


def as_torch(weight: np.ndarray) -> torch.Tensor:
    if weight.dtype == np.float32:
        return torch.from_numpy(weight)
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


def decoded(packed: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    return dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32)


def assert_reference(ours: Int8Arrays, weight: torch.Tensor) -> None:
    codes, scale = quantize_int8_channel(weight)
    assert np.array_equal(ours.scale, scale.numpy())
    assert np.array_equal(ours.codes, codes.numpy())
    back = dequantize_int8_channel(codes, scale, dtype=torch.float32)
    theirs = weight_error(weight.float(), back)
    total = ErrorSum()
    total.add_sums(ours.sums)
    found = total.result()
    for name in ("count", "max_abs", "saturated", "flushed", "not_finite", "exact"):
        assert getattr(found, name) == getattr(theirs, name), name
    for name in ("rel_rms", "sqnr_db"):
        expected = getattr(theirs, name)
        expected = expected and pytest.approx(expected, rel=1e-12)
        assert getattr(found, name) == expected, name


@pytest.mark.parametrize("name", MXFP4)
def test_casts_are_the_references(name):
    assert_reference(cast_to_int8(*MXFP4[name]), decoded(*MXFP4[name]))


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_floats_are_the_references(name, source):
    weight = BF16[name]
    if source == "float32":
        weight = (weight.astype(np.uint32) << 16 | 0x4321).view(np.float32)
    assert_reference(quantize_to_int8(weight), as_torch(weight))


@given(
    st.lists(st.integers(0, 255), min_size=64, max_size=64),
    st.lists(st.integers(0, 252), min_size=4, max_size=4),
)
def test_any_row_casts_as_the_reference(pairs, scales):
    packed, scale = np.array([pairs], np.uint8), np.array([scales], np.uint8)
    assert_reference(cast_to_int8(packed, scale), decoded(packed, scale))


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(-(2.0**120), 2.0**120, width=32),
    )
)
def test_any_floats_round_as_the_reference(weight):
    assert_reference(quantize_to_int8(weight), torch.from_numpy(weight))


def test_a_long_row_is_summed_whole():
    weight = (RNG.standard_normal((3, 70001)).astype("f4").view("u4") >> 16).astype("u2")
    assert_reference(quantize_to_int8(weight), as_torch(weight))


def test_threads_change_nothing():
    packed = RNG.integers(0, 256, (300, 2048), dtype=np.uint8)
    scale = RNG.integers(100, 120, (300, 128), dtype=np.uint8)
    floats = (RNG.standard_normal((300, 4096)).astype("f4").view("u4") >> 16).astype("u2")
    for call in (
        lambda threads: cast_to_int8(packed, scale, threads=threads),
        lambda threads: quantize_to_int8(floats, threads=threads),
    ):
        one, many = call(1), call(3)
        assert np.array_equal(one.codes, many.codes)
        assert np.array_equal(one.scale, many.scale)
        assert one.sums.noise == pytest.approx(many.sums.noise, rel=1e-12)
        assert one.sums.count == many.sums.count == floats.size
        assert one.sums.flushed == many.sums.flushed > 0


@pytest.mark.parametrize("shape", [(2, 3, 32), (0, 32)], ids=str)
def test_leading_dimensions_are_kept(shape):
    packed = np.full(shape, 0x11, np.uint8)
    scale = np.full((*shape[:-1], 2), 127, np.uint8)
    floats = np.full((*shape[:-1], 64), 0x3F80, np.uint16)
    for found in (cast_to_int8(packed, scale), quantize_to_int8(floats)):
        assert found.codes.shape == (*shape[:-1], 64)
        assert found.scale.shape == (*shape[:-1], 1)


def test_output_goes_into_the_buffer_that_was_given():
    packed, scale = MXFP4["every-byte"]
    out = np.empty((253, 512), np.int8)
    assert cast_to_int8(packed, scale, out=out).codes is out
    assert np.array_equal(out, cast_to_int8(packed, scale).codes)
    with pytest.raises(ValueError, match=r"out: expected contiguous int8 \[253, 512\]"):
        cast_to_int8(packed, scale, out=np.empty((253, 511), np.int8))


@pytest.mark.parametrize(
    ("code", "byte", "message"),
    [
        (0x00, 255, r"row 2, block 1: .* got 255 \(NaN\) in 1 blocks"),
        (0x04, 254, r"row 2, block 1: .* float32 holds, got infinity under scale 254"),
        (0xE0, 253, r"row 2, block 1: .* float32 holds, got infinity under scale 253"),
    ],
    ids=["nan", "low-nibble-overflow", "high-nibble-overflow"],
)
def test_faults_are_named_as_the_reference_names_them(code, byte, message):
    packed, scale = np.zeros((3, 32), np.uint8), np.full((3, 2), 127, np.uint8)
    packed[2, 20], scale[2, 1] = code, byte
    with pytest.raises(ValuesError, match=message) as ours:
        cast_to_int8(packed, scale)
    with pytest.raises(ValuesError) as theirs:
        decoded(packed, scale)
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=hex)
def test_values_no_scale_can_hold_are_refused_by_row(bits):
    weight = np.zeros((3, 5), np.uint16)
    weight[1, 4] = bits
    with pytest.raises(ValuesError, match=r"row 1, block 0: .* infinity in 1 places") as ours:
        quantize_to_int8(weight)
    with pytest.raises(ValuesError) as theirs:
        quantize_int8_channel(as_torch(weight))
    assert ours.value.message == theirs.value.message


def test_what_a_reader_would_decode_to_infinity_is_refused():
    weight = np.zeros((3, 5), np.uint16)
    weight[1, 4] = 0xFF7F  # 127.5 steps become 128
    with pytest.raises(ValuesError, match=r"row 1, block 0: .* infinity under scale") as ours:
        quantize_to_int8(weight)
    with pytest.raises(ValuesError) as theirs:
        dequantize_int8_channel(*quantize_int8_channel(as_torch(weight)), dtype=torch.float32)
    assert ours.value.message == theirs.value.message


def test_scale_grid_that_would_broadcast_is_refused():
    with pytest.raises(SchemaError, match=r"scale grid: expected \[4, 2\]"):
        cast_to_int8(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))
