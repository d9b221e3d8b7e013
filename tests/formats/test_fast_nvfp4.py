import numpy as np
import pytest
import torch

from k3quant.errors import ValuesError
from k3quant.formats import cast_nvfp4
from k3quant.formats.fast_nvfp4 import cast_to_nvfp4, count_scale_needs, shared_exponent
from k3quant.formats.nvfp4_exponent import best_exponent


def weight_of(low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(low + high)
    packed = rng.integers(0, 256, (4, 20, 64), dtype=np.uint8)
    packed[0, :5] = 0x80  # zero blocks
    packed[1] &= 0xBB  # codes 0 to 3 can move up
    packed[2] &= 0xCC  # codes 0 and 4 can move down
    return packed, rng.integers(low, high, (4, 20, 4)).astype(np.uint8)


SPREADS = pytest.mark.parametrize(
    ("low", "high"), [(110, 128), (100, 130), (0, 255), (120, 121)], ids=str
)


@SPREADS
def test_needs_are_the_references(low, high):
    packed, scale = weight_of(low, high)
    theirs = cast_nvfp4.count_scale_needs(torch.from_numpy(packed), torch.from_numpy(scale))
    ours = count_scale_needs(packed, scale)
    assert ours.sum() > 0
    assert np.array_equal(ours, theirs)


@SPREADS
def test_shared_exponent_is_the_best_of_all(low, high):
    weights = [weight_of(low, high), weight_of(low, max(high - 1, low + 1))]
    needs = sum(count_scale_needs(*weight) for weight in weights)
    assert shared_exponent(weights) == best_exponent(needs)


def test_scales_of_zero_blocks_do_not_raise_the_shared_exponent():
    packed, scale = weight_of(110, 120)
    packed[0], scale[0] = 0x80, 127
    assert shared_exponent([(packed, scale)]) == best_exponent(count_scale_needs(packed, scale))
    assert shared_exponent([(packed, scale)]) == 119 - 127 - 8
    assert shared_exponent([(packed & 0x88, scale)]) == 0
    assert shared_exponent([]) == 0


@SPREADS
@pytest.mark.parametrize("offset", [-3, 0, 1, 40], ids=lambda o: f"offset{o:+}")
def test_cast_is_the_references(low, high, offset):
    packed, scale = weight_of(low, high)
    exponent = min(best_exponent(count_scale_needs(packed, scale)) + offset, 126)
    ours = cast_to_nvfp4(packed, scale, exponent=exponent)
    theirs = cast_nvfp4.cast_mxfp4_to_nvfp4(
        torch.from_numpy(packed), torch.from_numpy(scale), exponent=exponent
    )
    assert np.array_equal(ours.packed, theirs.packed.numpy())
    assert np.array_equal(ours.scale_e4m3, theirs.scale_e4m3.numpy())
    assert ours.counts == theirs.counts


def test_codes_in_reach_are_not_copied():
    packed, scale = weight_of(110, 128)
    cast = cast_to_nvfp4(packed, scale, exponent=-8)
    assert cast.packed is packed
    assert cast.counts.lossless


def test_source_is_never_written():
    packed, scale = weight_of(100, 130)
    before = packed.copy()
    cast = cast_to_nvfp4(packed, scale, exponent=-8)
    assert not np.array_equal(cast.packed, packed)
    assert np.array_equal(packed, before)


def test_threads_add_their_needs():
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 256, (300, 1024), dtype=np.uint8)
    scale = rng.integers(100, 120, (300, 64), dtype=np.uint8)
    one, many = (count_scale_needs(packed, scale, threads=n) for n in (1, 3))
    assert one.sum() == 300 * 64 * 2
    assert np.array_equal(one, many)


@pytest.mark.parametrize(
    "call",
    [count_scale_needs, lambda p, s: cast_to_nvfp4(p, s, exponent=0)],
    ids=["needs", "cast"],
)
def test_nan_scales_are_refused_by_place(call):
    scale = np.full((2, 2), 127, np.uint8)
    scale[1, 0] = 255
    with pytest.raises(ValuesError, match=r"row 1, block 0: .* got 255"):
        call(np.zeros((2, 32), np.uint8), scale)
