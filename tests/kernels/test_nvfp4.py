from collections.abc import Callable

import pytest
import torch

from k3quant.formats import nvfp4
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale
from k3quant.kernels.nvfp4_dequantize import dequantize_nvfp4
from k3quant.kernels.nvfp4_quantize import quantize_nvfp4

CONVENTIONS = [pytest.param(convention, id=convention.value) for convention in GlobalConvention]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def uneven(dtype: torch.dtype) -> torch.Tensor:
    """Groups of many magnitudes, a zero group, and one whose scale would round to zero."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn((37, 5, 48), generator=generator)
    weight *= torch.exp2(torch.randint(-8, 3, (37, 5, 48), generator=generator))
    weight[0, 0] = -0.0
    weight[1, 2, :16] *= 1e-6
    return weight.to(dtype)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_bits_are_the_references(
    device: str, same_bits: Callable[..., bool], convention: GlobalConvention, dtype: torch.dtype
) -> None:
    weight = uneven(dtype)
    scale = nvfp4.global_scale_of_amax(float(weight.abs().max()), convention)
    packed, scale_e4m3, fault = quantize_nvfp4(weight.to(device), scale)
    expected_packed, expected_scale = nvfp4.quantize_nvfp4(weight, scale)
    assert same_bits(scale_e4m3, expected_scale)
    assert same_bits(packed, expected_packed)
    assert not fault


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_under_every_group_scale(
    device: str, same_bits: Callable[..., bool], convention: GlobalConvention, dtype: torch.dtype
) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(127).reshape(-1, 8)
    scale_e4m3 = torch.arange(127, dtype=torch.uint8).repeat_interleave(32).reshape(-1, 1)
    scale = GlobalScale(value=7.125, convention=convention)
    out, fault = dequantize_nvfp4(packed.to(device), scale_e4m3.to(device), scale, dtype=dtype)
    assert same_bits(out, nvfp4.dequantize_nvfp4(packed, scale_e4m3, scale, dtype=dtype))
    assert not fault


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF], ids=hex)
def test_group_scales_that_are_no_scales_are_flagged(device: str, byte: int) -> None:
    packed = torch.zeros(300, 8, dtype=torch.uint8, device=device)
    scale_e4m3 = torch.full((300, 1), 0x38, dtype=torch.uint8, device=device)
    scale_e4m3[299] = byte
    scale = GlobalScale(value=1.0, convention=GlobalConvention.MULTIPLIER)
    assert dequantize_nvfp4(packed, scale_e4m3, scale)[1]


@pytest.mark.parametrize(
    ("value", "overflows"),
    [pytest.param(2.0**116, False, id="fits"), pytest.param(2.0**117, True, id="overflows")],
)
def test_overflow_is_flagged(device: str, value: float, overflows: bool) -> None:
    packed = torch.zeros(2, 8, dtype=torch.uint8, device=device)
    packed[1, 7] = 0xF0  # -6 under 448: 2688 times the tensor's scale
    scale_e4m3 = torch.full((2, 1), 0x7E, dtype=torch.uint8, device=device)
    scale = GlobalScale(value=value, convention=GlobalConvention.MULTIPLIER)
    assert bool(dequantize_nvfp4(packed, scale_e4m3, scale)[1]) == overflows


def test_one_value_that_is_no_number_is_flagged(device: str) -> None:
    weight = torch.ones(200, 16, device=device)
    weight[199, 15] = float("nan")
    scale = GlobalScale(value=1.0, convention=GlobalConvention.DIVISOR)
    assert quantize_nvfp4(weight, scale)[2]


def test_nothing_gives_nothing(device: str) -> None:
    scale = GlobalScale(value=1.0, convention=GlobalConvention.DIVISOR)
    packed, scale_e4m3, _ = quantize_nvfp4(torch.zeros(0, 32, device=device), scale)
    assert dequantize_nvfp4(packed, scale_e4m3, scale)[0].shape == (0, 32)
