import numpy as np
import pytest

from k3quant.errors import SchemaError
from k3quant.formats.fast_stats import count_mxfp4, nan_scale_places


@pytest.mark.parametrize("threads", [1, 3])
def test_counts_are_numpys(threads):
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 256, (300, 2048), dtype=np.uint8)
    packed[7, :64] = np.tile(np.array([0x00, 0x80, 0x08, 0x88], np.uint8), 16)
    scale = rng.integers(0, 256, (300, 128), dtype=np.uint8)
    stats = count_mxfp4(packed, scale, threads=threads)
    nibbles = np.concatenate((packed & 0xF, packed >> 4))
    assert np.array_equal(stats.scales, np.bincount(scale.reshape(-1), minlength=256))
    assert np.array_equal(stats.bytes, np.bincount(packed.reshape(-1), minlength=256))
    assert np.array_equal(stats.codes, np.bincount(nibbles.reshape(-1), minlength=16))
    assert stats.zero_blocks == 4
    assert stats.blocks == scale.size
    assert stats.nan_blocks == (scale == 255).sum()
    assert stats.negative_zeros == (nibbles == 8).sum()


def test_counts_of_weights_add():
    one = count_mxfp4(np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint8))
    two = count_mxfp4(np.full((2, 16), 0x11, np.uint8), np.full((2, 1), 9, np.uint8))
    total = one + two
    assert (total.blocks, total.zero_blocks, int(total.codes[1])) == (3, 1, 64)


def test_empty_weight_counts_nothing():
    stats = count_mxfp4(np.zeros((0, 16), np.uint8), np.zeros((0, 1), np.uint8))
    assert (stats.blocks, stats.zero_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("limit", "expected"), [(10, [(0, 1, 1), (1, 0, 0)]), (1, [(0, 1, 1)])], ids=["all", "first"]
)
def test_nan_scales_are_found_in_row_order(limit, expected):
    scale = np.full((2, 2, 2), 127, np.uint8)
    scale[0, 1, 1] = scale[1, 0, 0] = 255
    assert nan_scale_places(scale, limit=limit) == expected


def test_scale_grid_that_would_broadcast_is_refused():
    with pytest.raises(SchemaError, match=r"expected \[4, 2\], got \[4, 1\]"):
        count_mxfp4(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))
