import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3quant.formats.cast_nvfp4 import cast_mxfp4_to_nvfp4, count_scale_needs
from k3quant.formats.nvfp4_exponent import NEEDS_SHAPE, best_exponent


def needs_of(*halves: tuple[int, int, int, int]) -> np.ndarray:
    """Needs from (block exponent, octaves down, octaves up, count)."""
    needs = np.zeros(NEEDS_SHAPE, np.int64)
    for exponent, down, up, count in halves:
        needs[exponent + 127, down, up] += count
    return needs


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (needs_of(), 0),
        (needs_of((0, 0, 0, 1)), -8),
        (needs_of((3, 0, 0, 5), (-14, 0, 0, 5)), -5),
        # 18 octaves apart: the upper half can move up by one, or the lower down by one.
        (needs_of((4, 0, 1, 5), (-14, 0, 0, 5)), -5),
        (needs_of((4, 0, 0, 5), (-14, 1, 0, 5)), -4),
        # -9 keeps the codes of the lower half, -8 those of the upper; both are exact under both.
        (needs_of((0, 0, 3, 5), (-18, 1, 0, 1)), -8),
        (needs_of((0, 0, 3, 1), (-18, 1, 0, 5)), -9),
        # Nothing can move: the large half is kept, however many small ones are lost.
        (needs_of((4, 0, 0, 1), (-14, 0, 0, 1000)), -4),
        (needs_of((127, 0, 0, 1)), 119),
        (needs_of((-127, 0, 0, 1)), -126),
    ],
    ids=[
        "all-zero",
        "one-block-sits-at-256",
        "17-octaves-fit-one-exponent",
        "upper-moves",
        "lower-moves",
        "fewest-codes-move-lower",
        "fewest-codes-move-upper",
        "no-saturation",
        "largest",
        "smallest",
    ],
)
def test_choice(needs, expected):
    assert best_exponent(needs) == expected


def test_needs_of_partners_add():
    upper, lower = needs_of((9, 0, 0, 1)), needs_of((-8, 0, 0, 1))
    assert best_exponent(upper) == 1
    assert best_exponent(lower) == -16
    assert best_exponent(upper + lower) == 1
    assert best_exponent(needs_of((10, 0, 0, 1)) + lower) == 2


@given(st.integers(0, 2**32), st.integers(100, 118), st.integers(1, 24))
@settings(max_examples=20)
def test_no_exponent_without_saturation_keeps_more_halves(seed, low, spread):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=generator)
    packed &= torch.randint(0, 256, (6, 1), dtype=torch.uint8, generator=generator)
    packed = packed.repeat(1, 2)  # equal halves, so that exact blocks count exact halves
    scale = torch.randint(low, low + spread, (6, 1), dtype=torch.uint8, generator=generator)
    chosen = best_exponent(count_scale_needs(packed, scale))
    counts = cast_mxfp4_to_nvfp4(packed, scale, exponent=chosen).counts
    assert counts.saturated == 0
    others = [
        cast_mxfp4_to_nvfp4(packed, scale, exponent=m).counts
        for m in range(chosen - 14, chosen + 14)
    ]
    assert counts.exact == max(other.exact for other in others if other.saturated == 0)
