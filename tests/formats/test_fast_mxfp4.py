import numpy as np
import pytest
import torch

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.fast_mxfp4 import dequantize_to_bf16, quantize_bf16
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4

FINITE = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
FINITE = FINITE[(FINITE & 0x7FFF) < 0x7F80]


def every_byte_under(scales: range) -> tuple[np.ndarray, np.ndarray]:
    packed = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    return packed, np.repeat(np.array(scales, np.uint8)[:, None], 16, axis=1)


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def bits_of(weight: torch.Tensor) -> np.ndarray:
    return weight.view(torch.int16).numpy().view(np.uint16)


def reference(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return bits_of(dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale)))


def test_every_byte_under_every_scale_decodes_as_the_reference():
    packed, scale = every_byte_under(range(253))
    assert np.array_equal(dequantize_to_bf16(packed, scale), reference(packed, scale))


@pytest.mark.parametrize(("byte", "mask"), [(253, 0x55), (254, 0x33)], ids=["up-to-3", "up-to-1.5"])
def test_the_last_scales_decode_what_bfloat16_holds(byte, mask):
    packed, scale = every_byte_under(range(byte, byte + 1))
    packed &= mask | 0x88
    assert np.array_equal(dequantize_to_bf16(packed, scale), reference(packed, scale))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_change_nothing(threads):
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (300, 2048), dtype=np.uint8)
    scale = rng.integers(0, 250, (300, 128), dtype=np.uint8)
    bits = dequantize_to_bf16(packed, scale, threads=threads)
    assert np.array_equal(bits, reference(packed, scale))
    again = quantize_bf16(bits, ScaleRounding.EVEN, threads=threads)
    theirs = quantize_mxfp4(as_bf16(bits), ScaleRounding.EVEN)
    assert np.array_equal(again[0], theirs[0].numpy())
    assert np.array_equal(again[1], theirs[1].numpy())


def test_output_goes_into_the_buffer_that_was_given():
    packed, scale = every_byte_under(range(120, 130))
    out = np.full((10, 512), 0x7FC0, np.uint16)
    assert dequantize_to_bf16(packed, scale, out=out) is out
    assert np.array_equal(out, reference(packed, scale))


@pytest.mark.parametrize(
    "out",
    [np.empty((10, 511), np.uint16), np.empty((10, 512), np.int16), np.empty((512, 10), "u2").T],
    ids=["shape", "dtype", "strides"],
)
def test_buffers_that_do_not_fit_are_refused(out):
    packed, scale = every_byte_under(range(120, 130))
    with pytest.raises(ValueError, match="out: expected contiguous uint16"):
        dequantize_to_bf16(packed, scale, out=out)


def test_read_only_input_is_read():
    packed, scale = every_byte_under(range(120, 130))
    expected = reference(packed, scale)
    packed.flags.writeable = scale.flags.writeable = False
    assert np.array_equal(dequantize_to_bf16(packed, scale), expected)


def test_input_with_strides_is_refused():
    packed, scale = np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8)
    with pytest.raises(ValueError, match="packed: expected a contiguous array"):
        dequantize_to_bf16(packed[:, ::2], scale)


@pytest.mark.parametrize("shape", [(2, 3, 32), (16,), (0, 16), (3, 0)], ids=str)
def test_leading_dimensions_are_kept(shape):
    packed = np.zeros(shape, np.uint8)
    scale = np.full((*shape[:-1], shape[-1] // 16), 127, np.uint8)
    assert dequantize_to_bf16(packed, scale).shape == (*shape[:-1], shape[-1] * 2)


@pytest.mark.parametrize(
    ("code", "byte", "message"),
    [
        (0x00, 255, r"row \[1, 2\], block 1: .* got 255 \(NaN\) in 1 blocks"),
        (0x04, 254, r"row \[1, 2\], block 1: .* bfloat16 holds, got infinity under scale 254"),
        (0x60, 253, r"row \[1, 2\], block 1: .* bfloat16 holds, got infinity under scale 253"),
    ],
    ids=["nan", "low-nibble-overflow", "high-nibble-overflow"],
)
def test_faults_are_named_as_the_reference_names_them(code, byte, message):
    packed = np.zeros((2, 3, 32), np.uint8)
    scale = np.full((2, 3, 2), 127, np.uint8)
    packed[1, 2, 20], scale[1, 2, 1] = code, byte
    with pytest.raises(ValuesError, match=message) as ours:
        dequantize_to_bf16(packed, scale)
    with pytest.raises(ValuesError, match=message) as theirs:
        dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale))
    assert ours.value.message == theirs.value.message


@pytest.mark.parametrize("grid", [(64, 1), (1, 2), (2,)], ids=str)
def test_scale_grids_that_would_broadcast_are_refused(grid):
    with pytest.raises(SchemaError, match=r"scale grid: expected \[64, 2\]"):
        dequantize_to_bf16(np.zeros((64, 32), np.uint8), np.zeros(grid, np.uint8))


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("order", ["by-value", "mixed", "near-in-pairs"])
def test_every_bfloat16_encodes_as_the_reference(order, rounding):
    rng = np.random.default_rng(2)
    by_value = np.sort(FINITE & 0x7FFF) | (rng.integers(0, 2, len(FINITE)) << 15).astype(np.uint16)
    weight = {
        "by-value": by_value,
        "mixed": rng.permutation(FINITE),
        "near-in-pairs": rng.permutation(by_value.reshape(-1, 2)).reshape(-1),
    }[order].reshape(-1, 64)
    packed, scale = quantize_bf16(weight, rounding)
    theirs = quantize_mxfp4(as_bf16(weight), rounding)
    assert np.array_equal(scale, theirs[1].numpy())
    assert np.array_equal(packed, theirs[0].numpy())


@pytest.mark.parametrize("rounding", ScaleRounding)
def test_ties_and_their_neighbours_encode_as_the_reference(rounding):
    # Each midpoint and the floats beside it, in blocks whose amax walks through the scale rules.
    ties = as_bf16(np.zeros(8, np.uint16)).new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5])
    near = np.concatenate([bits_of(ties) + np.uint16(step) for step in (-1 & 0xFFFF, 0, 1)])
    tops = bits_of(torch.arange(4.0, 9.0, 1 / 32).bfloat16())
    weight = np.tile(np.resize(near, 32), (len(tops), 1))
    weight[:, 31] = tops
    weight[::2] |= 0x8000
    packed, scale = quantize_bf16(weight, rounding)
    theirs = quantize_mxfp4(as_bf16(weight), rounding)
    assert np.array_equal(scale, theirs[1].numpy())
    assert np.array_equal(packed, theirs[0].numpy())


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81], ids=hex)
def test_values_no_scale_can_hold_are_refused_by_place(bits):
    weight = np.zeros((3, 64), np.uint16)
    weight[1, 41] = bits
    with pytest.raises(ValuesError, match="row 1, block 1: expected finite values"):
        quantize_bf16(weight, ScaleRounding.EVEN)


def test_columns_that_are_no_multiple_of_32_are_refused():
    with pytest.raises(SchemaError, match="multiple of 32, got 48"):
        quantize_bf16(np.zeros((2, 48), np.uint16), ScaleRounding.EVEN)
