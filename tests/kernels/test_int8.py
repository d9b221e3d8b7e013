from collections.abc import Callable

import pytest
import torch

from k3quant.formats import int8_channel
from k3quant.kernels import int8_quantize
from k3quant.kernels.int8_dequantize import dequantize_int8
from k3quant.kernels.int8_quantize import quantize_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    pytest.param((3, 5, 1100), id="words"),
    pytest.param((2, 7, 33), id="odd-columns"),
    pytest.param((9, 18), id="no-words-of-four"),
    pytest.param((2, 4200), id="two-programs-a-row"),
    pytest.param((0, 4), id="no-rows"),
]


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(32)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.exp2(torch.randint(-6, 3, shape, generator=generator))
    if weight.numel():
        weight[0, :3] = -0.0
        weight[-1] *= 2.0**-120
    return weight.to(dtype)


def bits_are_the_references(
    device: str, same_bits: Callable[..., bool], weight: torch.Tensor
) -> None:
    codes, scale, fault = quantize_int8(weight.to(device))
    expected_codes, expected_scale = int8_channel.quantize_int8_channel(weight)
    assert same_bits(scale, expected_scale)
    assert same_bits(codes, expected_codes)
    assert not fault


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_references_both_ways(
    device: str, same_bits: Callable[..., bool], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = uneven(shape, dtype)
    bits_are_the_references(device, same_bits, weight)
    codes, scale = int8_channel.quantize_int8_channel(weight)
    out, suspect = dequantize_int8(codes.to(device), scale.to(device), dtype=dtype)
    assert same_bits(out, int8_channel.dequantize_int8_channel(codes, scale, dtype=dtype))
    assert not suspect


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [130, 131], ids=["even", "odd"])
def test_rows_that_do_not_fit_are_read_twice(
    device: str,
    same_bits: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    cols: int,
) -> None:
    monkeypatch.setattr(int8_quantize, "_PAIRS_AT_ONCE", 16)
    bits_are_the_references(device, same_bits, uneven((5, cols), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_round_to_even(
    device: str, same_bits: Callable[..., bool], dtype: torch.dtype
) -> None:
    halves = torch.arange(-255, 256).to(dtype) / 2  # the largest, 127.5, sets scale 1.0
    bits_are_the_references(device, same_bits, halves[None].contiguous())


def test_every_integer_under_a_bfloat16_scale(device: str, same_bits: Callable[..., bool]) -> None:
    codes = torch.arange(-128, 128).to(torch.int8)[None]
    scale = torch.tensor([[0.3125]], dtype=torch.bfloat16)
    out, _ = dequantize_int8(codes.to(device), scale.to(device))
    assert same_bits(out, int8_channel.dequantize_int8_channel(codes, scale))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 3e36], ids=str)
def test_what_cannot_be_decoded_is_flagged(device: str, value: float) -> None:
    codes = torch.full((600, 4), -128, dtype=torch.int8, device=device)
    scale = torch.ones(600, 1, device=device)
    scale[599] = value
    assert dequantize_int8(codes, scale)[1]


def test_one_value_that_is_no_number_is_flagged(device: str) -> None:
    weight = torch.ones(130, 33, device=device)
    weight[129, 32] = -float("inf")
    assert quantize_int8(weight)[2]
