"""Two experts of the release's shapes, compiled: the interpreter would take hours for them."""

from collections.abc import Callable

import pytest
import torch

from k3quant import ops
from k3quant.formats import fast_fp8, fast_mxfp4, fast_nvfp4
from k3quant.formats.mx import ScaleRounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [pytest.param((2, 3072, 3584), id="w1"), pytest.param((2, 3584, 3072), id="w2")]


def release_like(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes under scales of the release's range, a few far away."""
    generator = torch.Generator().manual_seed(30)
    *lead, cols = shape
    packed = torch.randint(0, 256, (*lead, cols // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(112, 122, (*lead, cols // 32), dtype=torch.uint8, generator=generator)
    scales[0, 100:130, :20] = 97
    return packed, scales


@pytest.fixture(params=SHAPES)
def pair(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    return release_like(request.param)


def test_dequantize(
    pair: tuple[torch.Tensor, torch.Tensor], same_bits: Callable[..., bool]
) -> None:
    packed, scales = pair
    expected = fast_mxfp4.dequantize_to_bf16(packed.numpy(), scales.numpy())
    got = ops.dequantize_mxfp4(packed.cuda(), scales.cuda())
    assert same_bits(got.view(torch.int16), torch.from_numpy(expected).view(torch.int16))


@pytest.mark.parametrize("rule", list(ScaleRounding), ids=str)
def test_quantize(
    pair: tuple[torch.Tensor, torch.Tensor], same_bits: Callable[..., bool], rule: ScaleRounding
) -> None:
    weight = ops.dequantize_mxfp4(*(x.cuda() for x in pair), dtype=torch.float32)
    weight = (weight * torch.rand_like(weight)).bfloat16()
    packed, scales = ops.quantize_mxfp4(weight, rule)
    bits = weight.cpu().view(torch.uint16).numpy()
    expected_packed, expected_scales = fast_mxfp4.quantize_bf16(bits, rule)
    assert same_bits(packed, torch.from_numpy(expected_packed))
    assert same_bits(scales, torch.from_numpy(expected_scales))


def test_to_mxfp8(pair: tuple[torch.Tensor, torch.Tensor], same_bits: Callable[..., bool]) -> None:
    packed, scales = pair
    got, _, _ = ops.cast_mxfp4_to_mxfp8(packed.cuda(), scales.cuda())
    expected = fast_fp8.cast_to_mxfp8(packed.numpy(), scales.numpy())
    assert same_bits(got, torch.from_numpy(expected))


@pytest.mark.parametrize("rows_alone", [False, True], ids=["tiles", "rows"])
def test_to_fp8(
    pair: tuple[torch.Tensor, torch.Tensor], same_bits: Callable[..., bool], rows_alone: bool
) -> None:
    packed, scales = pair
    tile = (1, packed.shape[-1] * 2) if rows_alone else (128, 128)
    got = ops.cast_mxfp4_to_fp8(packed.cuda(), scales.cuda(), block_shape=tile)
    for i in range(len(packed)):
        expected = fast_fp8.cast_to_fp8(packed[i].numpy(), scales[i].numpy(), block_shape=tile)
        assert same_bits(got.codes[i], torch.from_numpy(expected.codes))
        assert same_bits(got.scale[i], torch.from_numpy(expected.scale))


def test_to_nvfp4(pair: tuple[torch.Tensor, torch.Tensor], same_bits: Callable[..., bool]) -> None:
    packed, scales = pair
    needs = ops.count_scale_needs(packed.cuda(), scales.cuda())
    assert (needs == fast_nvfp4.count_scale_needs(packed.numpy(), scales.numpy())).all()
    got = ops.cast_mxfp4_to_nvfp4(packed.cuda(), scales.cuda(), exponent=-9)
    expected = fast_nvfp4.cast_to_nvfp4(packed.numpy(), scales.numpy(), exponent=-9)
    assert same_bits(got.packed, torch.from_numpy(expected.packed))
    assert same_bits(got.scale_e4m3, torch.from_numpy(expected.scale_e4m3))
    assert got.counts == expected.counts
    assert not got.counts.lossless
