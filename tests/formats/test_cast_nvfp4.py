import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3quant.errors import ValuesError
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.cast_nvfp4 import cast_mxfp4_to_nvfp4, count_scale_needs
from k3quant.formats.e2m1 import E2M1_VALUES, decode_e2m1, unpack_nibbles
from k3quant.formats.e4m3 import decode_e4m3
from k3quant.formats.nvfp4 import (
    GlobalConvention,
    dequantize_nvfp4,
    global_scale_of_exponent,
)
from k3quant.formats.nvfp4_exponent import best_exponent

SCALES = decode_e4m3(torch.arange(1, 127, dtype=torch.int32).to(torch.uint8), torch.float64)


def values_of(packed: Tensor, scale_e8m0: Tensor) -> Tensor:
    """`[..., blocks, 32]` float64, exactly."""
    codes = decode_e2m1(unpack_nibbles(packed), torch.float64)
    exponent = scale_e8m0.double() - 127
    return codes.unflatten(-1, (-1, 32)) * torch.exp2(exponent)[..., None]


def values_after(packed: Tensor, scale_e4m3: Tensor, exponent: int) -> Tensor:
    codes = decode_e2m1(unpack_nibbles(packed), torch.float64).unflatten(-1, (-1, 16))
    groups = codes * decode_e4m3(scale_e4m3, torch.float64)[..., None] * 2.0**exponent
    return groups.flatten(-2).unflatten(-1, (-1, 32))


def block(codes: list[int]) -> Tensor:
    """One block of the given codes in turn."""
    nibbles = torch.tensor(list(itertools.islice(itertools.cycle(codes), 32)), dtype=torch.uint8)
    return (nibbles[0::2] | (nibbles[1::2] << 4))[None]


@pytest.mark.parametrize("convention", GlobalConvention)
def test_spread_of_17_octaves_passes_codes_through(convention):
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (64, 128), dtype=torch.uint8, generator=generator)
    scale = torch.randint(110, 128, (64, 8), dtype=torch.uint8, generator=generator)
    exponent = best_exponent(count_scale_needs(packed, scale))
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=exponent)
    assert exponent == 0 - 8
    assert torch.equal(cast.packed, packed)
    assert cast.counts == CastCounts(blocks=512, exact=512)
    back = dequantize_nvfp4(
        cast.packed,
        cast.scale_e4m3,
        global_scale_of_exponent(exponent, convention),
        dtype=torch.float32,
    )
    assert torch.equal(back.double(), values_of(packed, scale).flatten(-2))


@pytest.mark.parametrize("exponent", [-30, -12, -8, -3, 20])
@pytest.mark.parametrize("spread", [(100, 128), (0, 255)], ids=["near", "every-byte"])
def test_exact_counts_are_the_blocks_of_equal_value(exponent, spread):
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (40, 64), dtype=torch.uint8, generator=generator)
    packed[:20] &= 0xBB  # codes 0 to 3: room to move up
    packed[5] = 0x80
    scale = torch.randint(*spread, (40, 4), dtype=torch.uint8, generator=generator)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=exponent)
    before, after = values_of(packed, scale), values_after(cast.packed, cast.scale_e4m3, exponent)
    assert cast.counts.exact == int((before == after).all(dim=-1).sum())
    assert cast.counts.flushed == int(((before != 0) & (after == 0)).sum())
    assert 0 < cast.counts.exact < 160


_KINDS = {
    "half": ([1], 0, 3),
    "one": ([2, 0], -1, 2),
    "one-and-half": ([3, 11], 0, 2),
    "two": ([4], -2, 1),
    "three": ([5, 8], -1, 1),
    "four": ([6], -3, 0),
    "six": ([7, 15], -2, 0),
    "half-and-four": ([1, 6], 0, 0),
    "one-and-three": ([2, 5], -1, 1),
}


@pytest.mark.parametrize("need", range(-14, 14))
@pytest.mark.parametrize(("codes", "down", "up"), _KINDS.values(), ids=_KINDS)
def test_a_block_is_exact_as_far_as_its_codes_can_move(codes, down, up, need):
    packed, scale = block(codes), torch.tensor([[127 + need]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=0)
    reachable = -9 + down <= need <= 8 + up
    assert cast.counts.exact == int(reachable)
    assert cast.counts.rescued == int(reachable and not -9 <= need <= 8)
    equal = torch.equal(
        values_of(packed, scale), values_after(cast.packed, cast.scale_e4m3, exponent=0)
    )
    assert equal == reachable
    if -9 <= need <= 8:
        assert torch.equal(cast.packed, packed)


@pytest.mark.parametrize("need", range(-14, 14))
def test_no_other_group_scale_would_be_exact(need):
    # Every set of magnitudes against every E4M3 scale: where the cast gives up, nothing exists.
    magnitudes = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64)
    quotients = magnitudes[1:, None] * 2.0**need / SCALES[None]  # [7, 126]
    representable = torch.isin(quotients, magnitudes)
    sets = list(itertools.product([False, True], repeat=7))[1:]
    possible = [bool(representable[torch.tensor(chosen)].all(dim=0).any()) for chosen in sets]
    blocks = [block([code + 1 for code in range(7) if chosen[code]]) for chosen in sets]
    scale = torch.full((len(sets), 1), 127 + need, dtype=torch.uint8)
    packed = torch.cat(blocks)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=0)
    equal = values_of(packed, scale) == values_after(cast.packed, cast.scale_e4m3, exponent=0)
    assert equal.flatten(1).all(dim=1).tolist() == possible


def test_halves_move_independently():
    packed = torch.cat((block([2])[:, :8], block([1, 6])[:, :8]), dim=1)
    scale = torch.tensor([[127 + 8]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=-2)  # both halves need 2^10
    after = values_after(cast.packed, cast.scale_e4m3, -2)
    before = values_of(packed, scale)
    assert torch.equal(after[..., :16], before[..., :16])
    assert not torch.equal(after[..., 16:], before[..., 16:])
    assert cast.counts.exact == 0


@pytest.mark.parametrize("byte", [0, 60, 127, 254])
def test_zero_blocks_are_exact_under_any_byte_and_keep_their_signs(byte):
    packed = torch.full((1, 16), 0x80, dtype=torch.uint8)
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=-8)
    assert torch.equal(cast.packed, packed)
    assert bool((cast.scale_e4m3 >= 1).all())
    assert bool((cast.scale_e4m3 <= 0x7E).all())
    assert cast.counts == CastCounts(blocks=1, exact=1)


@given(
    st.lists(st.integers(0, 15), min_size=16, max_size=16),
    st.one_of(st.integers(-14, -10), st.integers(9, 12)),
)
@settings(max_examples=60)
def test_lost_halves_get_the_least_squared_error_of_all_scales(codes, need):
    packed = block(codes)
    scale = torch.tensor([[127 + need]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=0)
    before = values_of(packed, scale)[0, 0, :16]
    after = values_after(cast.packed, cast.scale_e4m3, 0)[0, 0, :16]
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    errors = [
        float((before[:, None] - grid[None] * s).abs().amin(dim=1).square().sum()) for s in SCALES
    ]
    assert float((before - after).square().sum()) == pytest.approx(min(errors), rel=1e-12)


def test_saturated_elements_are_counted():
    packed, scale = block([1, 6]), torch.tensor([[127 + 12]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=0)
    assert cast.counts.saturated == 16  # the fours, 16384 against at most 2688
    assert cast.counts.exact == 0


def test_of_equal_errors_the_smallest_scale_is_taken():
    cast = cast_mxfp4_to_nvfp4(block([1]), torch.tensor([[60]], dtype=torch.uint8), exponent=0)
    assert cast.scale_e4m3.tolist() == [[1, 1]]
    assert cast.counts == CastCounts(blocks=1, exact=0, flushed=32)


def test_far_apart_exponents_stay_finite():
    packed = block([1, 7]).repeat(2, 1)
    scale = torch.tensor([[0], [254]], dtype=torch.uint8)
    cast = cast_mxfp4_to_nvfp4(packed, scale, exponent=-126)
    assert cast.scale_e4m3.max() <= 0x7E
    assert cast.counts.exact == 1


def test_empty_weight_is_lossless():
    cast = cast_mxfp4_to_nvfp4(
        torch.zeros(0, 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.uint8), exponent=0
    )
    assert cast.scale_e4m3.shape == (0, 2)
    assert cast.counts.lossless


@pytest.mark.parametrize(
    "call",
    [count_scale_needs, lambda p, s: cast_mxfp4_to_nvfp4(p, s, exponent=0)],
    ids=["needs", "cast"],
)
def test_nan_scales_are_refused(call):
    with pytest.raises(ValuesError, match=r"row 0, block 0: .* got 255"):
        call(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
