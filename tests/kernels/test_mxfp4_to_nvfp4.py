from collections.abc import Callable

import pytest
import torch

from k3quant.formats import cast_nvfp4
from k3quant.kernels.mxfp4_to_nvfp4 import LOST, rescale_mxfp4_to_nvfp4

EXPONENT = -9
SPREADS = [
    pytest.param(4, id="all-in-reach"),
    pytest.param(13, id="some-moved"),
    pytest.param(60, id="many-lost"),
]


def mixed_mxfp4(spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense halves, halves whose codes can move by octaves, and zero halves of either sign."""
    generator = torch.Generator().manual_seed(4)
    packed = torch.randint(0, 256, (4, 70, 48), dtype=torch.uint8, generator=generator)
    movable = torch.tensor([0x24, 0x42, 0x0A, 0xC0], dtype=torch.uint8)
    packed[1] = movable[torch.randint(0, 4, (70, 48), generator=generator)]
    packed[2, :, 8:40] = 0x08
    scales = torch.randint(
        118 - spread, 119 + spread, (4, 70, 3), dtype=torch.uint8, generator=generator
    )
    return packed, scales


@pytest.mark.parametrize("spread", SPREADS)
def test_all_but_lost_halves_are_the_references(
    device: str, same_bits: Callable[..., bool], spread: int
) -> None:
    packed, scale_e8m0 = mixed_mxfp4(spread)
    out = rescale_mxfp4_to_nvfp4(packed.to(device), scale_e8m0.to(device), exponent=EXPONENT)
    expected = cast_nvfp4.cast_mxfp4_to_nvfp4(packed, scale_e8m0, exponent=EXPONENT)
    lost = out.scale_e4m3.cpu() == LOST
    halves = out.packed.cpu().unflatten(-1, (-1, 8))
    assert same_bits(out.scale_e4m3.cpu()[~lost], expected.scale_e4m3[~lost])
    assert same_bits(halves[~lost], expected.packed.unflatten(-1, (-1, 8))[~lost])
    assert same_bits(halves[lost], packed.unflatten(-1, (-1, 8))[lost])
    lost_blocks, rescued, nan = out.counts.tolist()
    assert expected.counts.blocks - lost_blocks == expected.counts.exact
    assert rescued == expected.counts.rescued
    assert not nan


def test_the_cases_occur() -> None:
    counts = [
        cast_nvfp4.cast_mxfp4_to_nvfp4(*mixed_mxfp4(spread), exponent=EXPONENT).counts
        for spread in (4, 13, 60)
    ]
    assert counts[0].lossless
    assert counts[1].rescued > 10
    assert counts[2].exact < counts[2].blocks


@pytest.mark.parametrize("exponent", [-126, 126], ids=str)
def test_every_scale_byte(device: str, same_bits: Callable[..., bool], exponent: int) -> None:
    packed = torch.zeros(255, 16, dtype=torch.uint8)  # zero halves are always exact
    scale_e8m0 = torch.arange(255, dtype=torch.uint8)[:, None]
    out = rescale_mxfp4_to_nvfp4(packed.to(device), scale_e8m0.to(device), exponent=exponent)
    expected = cast_nvfp4.cast_mxfp4_to_nvfp4(packed, scale_e8m0, exponent=exponent)
    assert same_bits(out.scale_e4m3, expected.scale_e4m3)


@pytest.mark.parametrize("blocks", [0, 1, 257], ids=str)
def test_odd_sizes(device: str, same_bits: Callable[..., bool], blocks: int) -> None:
    packed = torch.arange(blocks * 16).to(torch.uint8).reshape(blocks, 16)
    scale_e8m0 = torch.full((blocks, 1), 118, dtype=torch.uint8)
    out = rescale_mxfp4_to_nvfp4(packed.to(device), scale_e8m0.to(device), exponent=EXPONENT)
    assert same_bits(out.packed, packed)
    assert out.counts.tolist() == [0, 0, 0]


def test_one_nan_scale_is_flagged(device: str) -> None:
    packed, scale_e8m0 = mixed_mxfp4(4)
    scale_e8m0[3, 69, 2] = 255
    out = rescale_mxfp4_to_nvfp4(packed.to(device), scale_e8m0.to(device), exponent=EXPONENT)
    assert out.counts.tolist()[2]
