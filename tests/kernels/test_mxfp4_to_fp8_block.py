from collections.abc import Callable

import pytest
import torch

from k3quant.formats import cast_fp8
from k3quant.kernels.mxfp4_to_fp8_block import cast_mxfp4_to_fp8

SPREADS = [
    pytest.param(114, 127, id="near-scales"),
    pytest.param(100, 140, id="far-scales"),
    pytest.param(0, 255, id="all-scales"),
]
TILES = [
    pytest.param((2, 200, 96), (128, 128), id="short-edges"),
    pytest.param((1, 128, 256), (128, 128), id="whole-tiles"),
    pytest.param((2, 11, 352), (1, 352), id="rows"),
    pytest.param((3, 40, 64), (16, 32), id="small-tiles"),
    pytest.param((2, 7, 96), (3, 64), id="no-powers-of-two"),
]


def sparse_mxfp4(shape: tuple[int, ...], low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Many zero codes and some zero blocks of either sign, so that every reach occurs."""
    generator = torch.Generator().manual_seed(3)
    *lead, cols = shape
    packed = torch.randint(0, 256, (*lead, cols // 2), dtype=torch.uint8, generator=generator)
    kept = torch.rand((*lead, cols // 32, 1), generator=generator)
    dense = torch.rand((*lead, cols // 32, 16), generator=generator) < kept
    packed = packed * dense.flatten(-2)
    packed[0, :, :16] = 0x80
    scales = torch.randint(low, high, (*lead, cols // 32), dtype=torch.uint8, generator=generator)
    return packed, scales


@pytest.mark.parametrize(("low", "high"), SPREADS)
@pytest.mark.parametrize(("shape", "block_shape"), TILES)
def test_bytes_scales_and_counts_are_the_references(
    device: str,
    same_bits: Callable[..., bool],
    shape: tuple[int, ...],
    block_shape: tuple[int, int],
    low: int,
    high: int,
) -> None:
    packed, scale_e8m0 = sparse_mxfp4(shape, low, high)
    cast = cast_mxfp4_to_fp8(packed.to(device), scale_e8m0.to(device), block_shape=block_shape)
    expected = cast_fp8.cast_mxfp4_to_fp8(packed, scale_e8m0, block_shape=block_shape)
    assert same_bits(cast.codes, expected.codes)
    assert same_bits(cast.scale, expected.scale)
    lost, flushed, nan = cast.counts.tolist()
    assert expected.counts.blocks - lost == expected.counts.exact
    assert flushed == expected.counts.flushed
    assert not nan


def test_every_code_under_every_octave(device: str, same_bits: Callable[..., bool]) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(30).reshape(30, 256)
    scale_e8m0 = (127 - torch.arange(30, dtype=torch.uint8)[:, None]).repeat(1, 16).contiguous()
    cast = cast_mxfp4_to_fp8(packed.to(device), scale_e8m0.to(device), block_shape=(128, 512))
    expected = cast_fp8.cast_mxfp4_to_fp8(packed, scale_e8m0, block_shape=(128, 512))
    assert same_bits(cast.codes, expected.codes)
    assert cast.counts.tolist()[1] == expected.counts.flushed > 0


def test_zero_tiles_get_scale_one(device: str) -> None:
    packed = torch.zeros(4, 64, dtype=torch.uint8, device=device)
    scale_e8m0 = torch.zeros(4, 4, dtype=torch.uint8, device=device)
    cast = cast_mxfp4_to_fp8(packed, scale_e8m0, block_shape=(128, 128))
    assert cast.scale.tolist() == [[1.0]]


def test_one_nan_scale_is_flagged(device: str) -> None:
    packed, scale_e8m0 = sparse_mxfp4((1, 140, 160), 118, 121)
    scale_e8m0[0, 139, 4] = 255
    cast = cast_mxfp4_to_fp8(packed.to(device), scale_e8m0.to(device), block_shape=(128, 128))
    assert cast.counts.tolist()[2]


def test_tiles_that_cut_blocks_are_refused(device: str) -> None:
    packed, scale_e8m0 = sparse_mxfp4((1, 2, 96), 118, 121)
    with pytest.raises(ValueError, match="tile columns: expected a multiple of 32, got 48"):
        cast_mxfp4_to_fp8(packed.to(device), scale_e8m0.to(device), block_shape=(128, 48))
