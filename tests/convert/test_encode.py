import numpy as np
import pytest
import torch

from k3quant.convert.buffers import Scratch
from k3quant.convert.choice import SHAPE, Choice, Format, encoded_parts
from k3quant.convert.encode import decode_parts, encode_floats, encode_from_mxfp4
from k3quant.errors import ValuesError
from k3quant.formats.error import ErrorSum, weight_error
from k3quant.formats.mxfp4 import dequantize_mxfp4

RNG = np.random.default_rng(12)
NUMPY = {"I8": np.int8, "I32": np.int32, "I64": np.int64, "F32": np.float32, "BF16": np.uint16}
INTEGERS = pytest.mark.parametrize(
    "choice",
    [Choice(format=Format.INT8), Choice(format=Format.INT4),
     Choice(format=Format.INT4, group_size=128)],
    ids=["int8", "int4-g32", "int4-g128"],
)  # fmt: skip


def assert_is_what_a_reader_finds(choice, parts, error, values):
    for name, dtype, shape in encoded_parts(choice, *values.shape):
        assert (parts[name].dtype, parts[name].shape) == (NUMPY[dtype], shape)
    if SHAPE in parts:
        assert parts[SHAPE].tolist() == list(values.shape)
    theirs = weight_error(values.float(), decode_parts(choice, parts, tuple(values.shape)))
    for field in ("count", "max_abs", "saturated", "flushed", "exact"):
        assert getattr(error, field) == getattr(theirs, field), field
    assert error.sqnr_db == pytest.approx(theirs.sqnr_db, rel=1e-12)


@INTEGERS
def test_integers_from_mxfp4_report_the_error_of_what_is_stored(choice):
    packed = RNG.integers(0, 256, (48, 128), dtype=np.uint8)
    scale = RNG.integers(112, 124, (48, 8), dtype=np.uint8)
    encoded = encode_from_mxfp4(packed, scale, choice, Scratch())
    values = dequantize_mxfp4(
        torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.float32
    )
    assert (encoded.counts, encoded.exact) == (None, False)
    assert_is_what_a_reader_finds(choice, encoded.parts, encoded.error, values)


@INTEGERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_integers_from_floats_report_the_error_of_what_is_stored(choice, dtype):
    values = torch.from_numpy(RNG.standard_normal((48, 256)).astype(np.float32)).to(dtype)
    sums = ErrorSum()
    parts = encode_floats(values, choice, sums)
    assert_is_what_a_reader_finds(choice, parts, sums.result(), values)


@INTEGERS
def test_zeros_are_exact(choice):
    encoded = encode_from_mxfp4(
        np.full((4, 64), 0x80, np.uint8), np.full((4, 4), 200, np.uint8), choice, Scratch()
    )
    assert encoded.exact
    assert encoded.error.sqnr_db is None


@INTEGERS
def test_nan_scales_are_refused(choice):
    scale = np.full((4, 4), 127, np.uint8)
    scale[2, 3] = 255
    with pytest.raises(ValuesError, match=r"row 2, block 3: .* got 255 \(NaN\)"):
        encode_from_mxfp4(np.zeros((4, 64), np.uint8), scale, choice, Scratch())
