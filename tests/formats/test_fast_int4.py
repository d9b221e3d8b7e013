from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats import fast_int_round
from k3quant.formats.error import ErrorSum, weight_error
from k3quant.formats.fast_int4 import Int4Arrays, cast_to_int4, quantize_to_int4
from k3quant.formats.int4 import Int4Range, dequantize_int4, quantize_int4
from k3quant.formats.mxfp4 import dequantize_mxfp4

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
RNG = np.random.default_rng(8)
FINITE = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
# At the last octave -8 times a scale is beyond float32.
FINITE = FINITE[(FINITE & 0x7FFF) < 0x7F00]
SIGNS = (RNG.integers(0, 2, len(FINITE)) << 15).astype(np.uint16)
BF16 = {
    "mixed": RNG.permutation(FINITE)[: 500 * 128].reshape(500, 128),
    "by-value": (np.sort(FINITE & 0x7FFF) | SIGNS)[: 500 * 128].reshape(500, 128),
    "normal": (RNG.standard_normal((60, 256)).astype("f4").view("u4") >> 16).astype("u2"),
    "zero": np.full((3, 128), 0x8000, np.uint16),
    "integers": np.tile(RNG.integers(-7, 8, (40, 128)), (1, 2)).astype("f4").view("u4") >> 16,
}
BF16["integers"] = BF16["integers"].astype(np.uint16)

OPTIONS = pytest.mark.parametrize(
    ("group_size", "grid", "scale_dtype"),
    list(product((32, 128), Int4Range, TORCH_DTYPES)),
    ids=lambda value: str(value),
)


def mxfp4_weights() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every code beside every other under every scale, near and far scales, zero blocks."""
    every = np.tile(np.arange(256, dtype=np.uint8), (253, 1))
    scales = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 16, axis=1)
    # Blocks that hold codes up to one magnitude only, so that each is the largest of some.
    capped = RNG.integers(0, 8, (8, 253, 64)) % (np.arange(8)[:, None, None] + 1)
    capped[..., ::32] = np.arange(8)[:, None, None]
    capped |= RNG.integers(0, 2, capped.shape) << 3
    low_tops = (capped[..., ::2] | capped[..., 1::2] << 4).astype(np.uint8)
    packed = RNG.integers(0, 256, (60, 128), dtype=np.uint8)
    packed[0, :64], packed[1] = 0x80, 0
    packed[2, 16:] = 0x08
    by_top = np.repeat(np.arange(253, dtype=np.uint8), 2).reshape(253, 2)
    return {
        "every-byte": (every, scales),
        "every-largest": (low_tops.reshape(2024, 32), np.tile(by_top, (8, 1))),
        "near": (packed, RNG.integers(110, 124, (60, 8), dtype=np.uint8)),
        "far": (packed, RNG.integers(0, 253, (60, 8), dtype=np.uint8)),
        "lowest": (packed, RNG.integers(0, 5, (60, 8), dtype=np.uint8)),
    }


MXFP4 = mxfp4_weights()


def as_torch(weight: np.ndarray) -> torch.Tensor:
    if weight.dtype == np.float32:
        return torch.from_numpy(weight)
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


def assert_reference(ours: Int4Arrays, weight: torch.Tensor, **options) -> None:
    dtype = TORCH_DTYPES[options.pop("scale_dtype")]
    words, scale = quantize_int4(weight, scale_dtype=dtype, **options)
    bits = torch.from_numpy(ours.scale.view(np.int16 if dtype.itemsize == 2 else np.int32))
    assert torch.equal(bits.view(dtype), scale)
    assert np.array_equal(ours.words, words.numpy())
    back = dequantize_int4(
        words, scale, cols=weight.shape[-1], group_size=options["group_size"], dtype=torch.float32
    )
    assert_error(ours.sums, weight_error(weight.float(), back))


def assert_error(sums, theirs) -> None:
    total = ErrorSum()
    total.add_sums(sums)
    ours = total.result()
    exact = ("count", "max_abs", "saturated", "flushed", "not_finite", "exact")
    for name in exact:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("rel_rms", "sqnr_db"):
        expected = getattr(theirs, name)
        expected = expected and pytest.approx(expected, rel=1e-12)
        assert getattr(ours, name) == expected, name


@OPTIONS
@pytest.mark.parametrize("name", MXFP4)
def test_casts_are_the_references(name, group_size, grid, scale_dtype):
    packed, scale = (array.copy() for array in MXFP4[name])
    if packed.shape[1] * 2 % group_size:
        packed, scale = packed.reshape(-1, group_size // 2), scale.reshape(-1, group_size // 32)
    if scale_dtype == "F16":
        scale %= 141  # float16 reaches no further
    options = {"group_size": group_size, "grid": grid, "scale_dtype": scale_dtype}
    weight = dequantize_mxfp4(
        torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32
    )
    assert_reference(cast_to_int4(packed, scale, **options), weight, **options)


@OPTIONS
@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_floats_are_the_references(name, source, group_size, grid, scale_dtype):
    weight = BF16[name]
    if scale_dtype == "F16":
        weight = np.minimum(weight & 0x7FFF, 0x4700) | (weight & 0x8000)
    if source == "float32":
        weight = (weight.astype(np.uint32) << 16 | 0x1234).view(np.float32)
    options = {"group_size": group_size, "grid": grid, "scale_dtype": scale_dtype}
    assert_reference(quantize_to_int4(weight, **options), as_torch(weight), **options)


@given(
    st.lists(st.integers(0, 255), min_size=64, max_size=64),
    st.lists(st.integers(0, 252), min_size=4, max_size=4),
    st.sampled_from([32, 128]),
    st.sampled_from(Int4Range),
)
def test_any_block_casts_as_the_reference(pairs, scales, group_size, grid):
    packed, scale = np.array([pairs], np.uint8), np.array([scales], np.uint8)
    weight = dequantize_mxfp4(
        torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32
    )
    options = {"group_size": group_size, "grid": grid, "scale_dtype": "BF16"}
    assert_reference(cast_to_int4(packed, scale, **options), weight, **options)


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=32, max_size=32))
def test_any_floats_round_as_the_reference(values):
    weight = np.array([values], np.float32)
    options = {"group_size": 32, "grid": Int4Range.BALANCED, "scale_dtype": "BF16"}
    assert_reference(quantize_to_int4(weight, **options), torch.from_numpy(weight), **options)


def test_the_reference_decides_between_scales_of_equal_error(monkeypatch):
    asked = []
    reference = fast_int_round._reference_scales
    monkeypatch.setattr(
        fast_int_round,
        "_reference_scales",
        lambda values, *types: asked.append(len(values)) or reference(values, *types),
    )
    # Rows of one element of a group beside zeros: 7 steps of a scale, or of its neighbour.
    weight = np.zeros((1 << 14, 32), np.float32)
    weight[:, 0] = np.linspace(1, 2, 1 << 14, dtype=np.float32)
    weight[1::2, 0] = np.float32(7) * (np.float32(0.2001953125) + np.float32(2.0**-11))
    options = {"group_size": 32, "grid": Int4Range.BALANCED, "scale_dtype": "BF16"}
    assert_reference(quantize_to_int4(weight, **options), torch.from_numpy(weight), **options)
    assert 0 < sum(asked) < len(weight)


def test_threads_change_nothing():
    packed = RNG.integers(0, 256, (300, 2048), dtype=np.uint8)
    scale = RNG.integers(100, 120, (300, 128), dtype=np.uint8)
    floats = (RNG.standard_normal((300, 4096)).astype("f4").view("u4") >> 16).astype("u2")
    for call in (
        lambda threads: cast_to_int4(packed, scale, group_size=128, threads=threads),
        lambda threads: quantize_to_int4(floats, group_size=32, threads=threads),
    ):
        one, many = call(1), call(3)
        assert np.array_equal(one.words, many.words)
        assert np.array_equal(one.scale, many.scale)
        assert one.sums.noise == pytest.approx(many.sums.noise, rel=1e-12)
        assert one.sums.count == many.sums.count == floats.size
        assert one.sums.flushed == many.sums.flushed > 0


@pytest.mark.parametrize("shape", [(2, 3, 64), (64,), (0, 64)], ids=str)
def test_leading_dimensions_are_kept(shape):
    packed = np.full(shape, 0x11, np.uint8)
    scale = np.full((*shape[:-1], 4), 127, np.uint8)
    floats = np.full((*shape[:-1], 128), 0x3F80, np.uint16)
    for found in (
        cast_to_int4(packed, scale, group_size=32),
        quantize_to_int4(floats, group_size=32),
    ):
        assert found.words.shape == (*shape[:-1], 16)
        assert found.scale.shape == (*shape[:-1], 4)


def test_read_only_source_is_read_and_the_buffer_is_filled():
    packed, scale = (array.copy() for array in MXFP4["near"])
    packed.flags.writeable = scale.flags.writeable = False
    out = np.full((60, 32), -1, np.int32)
    found = cast_to_int4(packed, scale, group_size=32, out=out)
    assert found.words is out
    assert np.array_equal(out, cast_to_int4(packed, scale, group_size=32).words)
    with pytest.raises(ValueError, match=r"out: expected contiguous int32 \[60, 32\]"):
        cast_to_int4(packed, scale, group_size=32, out=np.empty((60, 31), np.int32))


@pytest.mark.parametrize("grid", Int4Range)
@pytest.mark.parametrize(
    ("code", "byte", "message"),
    [
        (0x00, 255, r"row \[1, 2\], block 1: .* got 255 \(NaN\) in 1 blocks"),
        (0x04, 254, r"row \[1, 2\], block 1: .* float32 holds, got infinity under scale 254"),
        (0xE0, 253, r"row \[1, 2\], block 1: .* float32 holds, got infinity under scale 253"),
    ],
    ids=["nan", "low-nibble-overflow", "high-nibble-overflow"],
)
def test_faults_are_named_as_the_reference_names_them(code, byte, message, grid):
    packed = np.zeros((2, 3, 32), np.uint8)
    scale = np.full((2, 3, 2), 127, np.uint8)
    packed[1, 2, 20], scale[1, 2, 1] = code, byte
    scale[0, 0, 0] = 254  # zeros, whatever their scale
    with pytest.raises(ValuesError, match=message) as ours:
        cast_to_int4(packed, scale, group_size=32, grid=grid, scale_dtype="BF16")
    with pytest.raises(ValuesError, match=message) as theirs:
        dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32)
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize(
    ("code", "byte"),
    [(code, byte) for byte, largest in ((253, 5), (254, 3)) for code in range(largest + 1)],
    ids=lambda value: str(value),
)
def test_the_last_scales_cast_what_float32_holds(code, byte):
    packed, scale = np.full((1, 16), code, np.uint8), np.full((1, 1), byte, np.uint8)
    options = {"group_size": 32, "grid": Int4Range.FULL, "scale_dtype": "BF16"}
    weight = dequantize_mxfp4(
        torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32
    )
    assert_reference(cast_to_int4(packed, scale, **options), weight, **options)


@pytest.mark.parametrize(
    ("code", "byte"), [(6, 253), (7, 253), (4, 254), (5, 254), (6, 254), (7, 254)], ids=str
)
def test_the_last_scales_refuse_what_float32_does_not_hold(code, byte):
    packed, scale = np.full((1, 16), code, np.uint8), np.full((1, 1), byte, np.uint8)
    with pytest.raises(ValuesError) as ours:
        cast_to_int4(packed, scale, group_size=32)
    with pytest.raises(ValuesError) as theirs:
        dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32)
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=hex)
@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
def test_values_no_scale_can_hold_are_refused_by_place(bits, wide):
    weight = np.zeros((3, 64), np.uint16)
    weight[1, 41] = weight[2, 0] = bits
    if wide:
        weight = (weight.astype(np.uint32) << 16).view(np.float32)
    with pytest.raises(ValuesError, match=r"row 1, block 1: .* infinity in 2 places") as ours:
        quantize_to_int4(weight, group_size=32)
    with pytest.raises(ValuesError) as theirs:
        quantize_int4(as_torch(weight), group_size=32)
    assert ours.value.message == theirs.value.message


def test_what_a_reader_would_decode_to_infinity_is_refused():
    weight = np.zeros((2, 64), np.uint16)
    weight[1, 40] = 0xFF7F  # 7.5 steps become 8
    with pytest.raises(ValuesError, match=r"row 1, block 1: .* infinity under scale") as ours:
        quantize_to_int4(weight, group_size=32, scale_dtype="BF16")
    words, scale = quantize_int4(as_torch(weight), group_size=32, scale_dtype=torch.bfloat16)
    with pytest.raises(ValuesError) as theirs:
        dequantize_int4(words, scale, cols=64, group_size=32, dtype=torch.float32)
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize("grid", Int4Range)
def test_scales_beyond_float16_are_refused(grid):
    packed, scale = np.full((2, 32), 0x77, np.uint8), np.full((2, 2), 127, np.uint8)
    scale[1, 1] = 180
    with pytest.raises(ValuesError, match=r"scale \[1, 1\]: .* got inf and 0 more"):
        cast_to_int4(packed, scale, group_size=32, grid=grid, scale_dtype="F16")


def test_a_neighbour_beyond_float16_is_refused_as_the_reference_finds_it():
    weight = np.full((1, 32), 65504.0 * 7, np.float32)  # the next scale is infinite
    options = {"group_size": 32, "grid": Int4Range.BALANCED}
    _, scale = quantize_int4(torch.from_numpy(weight), scale_dtype=torch.float16, **options)
    assert torch.isinf(scale).all()
    with pytest.raises(ValuesError, match=r"scale \[0, 0\]: .* got inf"):
        quantize_to_int4(weight, scale_dtype="F16", **options)


def test_columns_that_are_no_whole_groups_are_refused():
    with pytest.raises(SchemaError, match="multiple of 128, got 192"):
        cast_to_int4(np.zeros((2, 96), np.uint8), np.zeros((2, 6), np.uint8), group_size=128)
    with pytest.raises(SchemaError, match="multiple of 128, got 192"):
        quantize_to_int4(np.zeros((2, 192), np.uint16), group_size=128)


def test_other_groups_and_scale_grids_are_refused():
    packed = np.zeros((4, 32), np.uint8)
    with pytest.raises(ValueError, match="group_size: expected 32 or 128, got 64"):
        cast_to_int4(packed, np.zeros((4, 2), np.uint8), group_size=64)
    with pytest.raises(SchemaError, match=r"scale grid: expected \[4, 2\]"):
        cast_to_int4(packed, np.zeros((4, 1), np.uint8), group_size=32)
