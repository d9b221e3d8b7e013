"""Weights of the release's shapes, compiled: the interpreter would take hours for them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from k3quant import dense_ops, ops
from k3quant.formats import (
    fast_fp8,
    fast_mxfp4,
    fast_nvfp4,
    fp8_block,
    fp8_channel,
    int4,
    int8_channel,
    mxfp8,
    nvfp4,
)
from k3quant.formats.int4 import Int4Range
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale

pytestmark = pytest.mark.gpu

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


ROWS = (1, 7168)
WIDE = (-110, 100)
INT4 = {"group_size": 32, "grid": Int4Range.FULL, "scale_dtype": torch.bfloat16}
K2 = {"group_size": 32, "grid": Int4Range.BALANCED, "scale_dtype": torch.bfloat16}
DIVISOR = GlobalScale(value=3333.3, convention=GlobalConvention.DIVISOR)
MULTIPLIER = GlobalScale(value=0.000321, convention=GlobalConvention.MULTIPLIER)
DENSE: list[Any] = [
    pytest.param(
        partial(dense_ops.quantize_nvfp4, global_scale=scale),
        partial(nvfp4.quantize_nvfp4, global_scale=scale),
        partial(dense_ops.dequantize_nvfp4, global_scale=scale),
        partial(nvfp4.dequantize_nvfp4, global_scale=scale),
        (-24, 6),  # beyond both ends of the group scales
        id=f"nvfp4-{scale.convention.value}",
    )
    for scale in (DIVISOR, MULTIPLIER)
]
DENSE += [
    pytest.param(
        partial(dense_ops.quantize_int4, **settings),
        partial(int4.quantize_int4, **settings),
        partial(dense_ops.dequantize_int4, cols=7168, group_size=32),
        partial(int4.dequantize_int4, cols=7168, group_size=32),
        WIDE,
        id=f"int4-{settings['grid'].value}",
    )
    for settings in (INT4, K2)
]
DENSE += [
    pytest.param(
        dense_ops.quantize_fp8_block,
        fp8_block.quantize_fp8_block,
        dense_ops.dequantize_fp8_block,
        fp8_block.dequantize_fp8_block,
        WIDE,
        id="fp8-block",
    ),
    pytest.param(
        partial(dense_ops.quantize_fp8_block, block_shape=ROWS),
        fp8_channel.quantize_fp8_channel,
        partial(dense_ops.dequantize_fp8_block, block_shape=ROWS),
        fp8_channel.dequantize_fp8_channel,
        WIDE,
        id="fp8-channel",
    ),
    pytest.param(
        partial(dense_ops.quantize_mxfp8, rounding=ScaleRounding.RCEIL),
        partial(mxfp8.quantize_mxfp8, rounding=ScaleRounding.RCEIL),
        dense_ops.dequantize_mxfp8,
        mxfp8.dequantize_mxfp8,
        WIDE,
        id="mxfp8",
    ),
    pytest.param(
        dense_ops.quantize_int8_channel,
        int8_channel.quantize_int8_channel,
        dense_ops.dequantize_int8_channel,
        int8_channel.dequantize_int8_channel,
        WIDE,
        id="int8",
    ),
]


@pytest.mark.parametrize(("quantize", "reference", "dequantize", "back", "octaves"), DENSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_weights(
    same_bits: Callable[..., bool],
    quantize: Callable[..., Any],
    reference: Callable[..., Any],
    dequantize: Callable[..., Any],
    back: Callable[..., Any],
    octaves: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(33)
    weight = torch.randn((384, 7168), generator=generator)
    # Rows of many magnitudes, and in each of them values of few bits, for ties.
    weight *= torch.exp2(torch.linspace(*octaves, 384))[:, None]
    weight[:, ::3] = (weight[:, ::3].view(torch.int32) & -(1 << 21)).view(torch.float32)
    weight = weight.to(dtype)
    codes, scale = quantize(weight.cuda())
    expected, expected_scale = reference(weight)
    assert same_bits(scale, expected_scale)
    assert same_bits(codes, expected)
    assert same_bits(dequantize(codes, scale), back(expected, expected_scale))
