import numpy as np
import pytest
import torch

from k3quant.errors import ValuesError
from k3quant.formats.cast_fp8 import cast_mxfp4_to_fp8
from k3quant.formats.casts import cast_mxfp4_to_mxfp8
from k3quant.formats.fast_fp8 import cast_to_fp8, cast_to_mxfp8


def weight_of(rows: int, cols: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows + high)
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    packed[: rows // 8] = 0x80
    packed[rows // 8 : rows // 4] &= 0xBB
    return packed, rng.integers(low, high, (rows, cols // 32)).astype(np.uint8)


@pytest.mark.parametrize(
    ("low", "high"), [(110, 125), (110, 140), (0, 255), (250, 255), (0, 20)], ids=str
)
@pytest.mark.parametrize("block_shape", [(128, 128), (1, 160), (64, 32)], ids=str)
def test_tiles_are_the_references(low, high, block_shape):
    packed, scale = weight_of(200, 160, low, high)
    ours = cast_to_fp8(packed, scale, block_shape=block_shape)
    theirs = cast_mxfp4_to_fp8(
        torch.from_numpy(packed), torch.from_numpy(scale), block_shape=block_shape
    )
    assert np.array_equal(ours.codes, theirs.codes.numpy())
    assert np.array_equal(ours.scale, theirs.scale.numpy())
    assert ours.counts == theirs.counts


def test_threads_change_nothing():
    packed, scale = weight_of(700, 2048, 105, 130)
    one, many = (cast_to_fp8(packed, scale, threads=threads) for threads in (1, 3))
    assert np.array_equal(one.codes, many.codes)
    assert np.array_equal(one.scale, many.scale)
    assert one.counts == many.counts
    assert not one.counts.lossless


def test_mxfp8_is_the_references_for_every_byte():
    packed = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    scale = np.full((4, 16), 200, np.uint8)
    theirs = cast_mxfp4_to_mxfp8(torch.from_numpy(packed), torch.from_numpy(scale))[0]
    assert np.array_equal(cast_to_mxfp8(packed, scale), theirs.numpy())


@pytest.mark.parametrize("cast", [cast_to_mxfp8, cast_to_fp8], ids=["mxfp8", "fp8"])
def test_output_goes_into_the_buffer_that_was_given(cast):
    packed, scale = weight_of(8, 64, 110, 120)
    out = np.full((8, 64), 0x7F, np.uint8)
    cast(packed, scale, out=out)
    assert not (out & 0x7F == 0x7F).any()
    with pytest.raises(ValueError, match=r"expected contiguous uint8 \[8, 64\]"):
        cast(packed, scale, out=np.empty((8, 32), np.uint8))


@pytest.mark.parametrize("cast", [cast_to_mxfp8, cast_to_fp8], ids=["mxfp8", "fp8"])
def test_nan_scales_are_refused_by_place(cast):
    packed, scale = weight_of(8, 64, 110, 120)
    scale[3, 1] = 255
    with pytest.raises(ValuesError, match=r"row 3, block 1: .* got 255"):
        cast(packed, scale)


def test_tiles_that_cut_a_block_are_refused():
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        cast_to_fp8(*weight_of(8, 96, 110, 112), block_shape=(8, 48))
