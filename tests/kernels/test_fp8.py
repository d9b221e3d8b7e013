from collections.abc import Callable

import pytest
import torch

from k3quant.formats import fp8_block
from k3quant.kernels.fp8_dequantize import dequantize_fp8
from k3quant.kernels.fp8_quantize import quantize_fp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILES = [
    pytest.param((2, 135, 160), (128, 128), id="short-edges"),
    pytest.param((3, 5, 1100), (1, 1100), id="wide-rows"),
    pytest.param((2, 7, 33), (3, 7), id="no-powers-of-two"),
    pytest.param((2, 130, 300), (128, 200), id="tiles-read-twice"),
    pytest.param((1, 5, 301), (128, 256), id="odd-tiles-read-twice"),
    pytest.param((3, 4300), (1, 4300), id="two-programs-a-row"),
    pytest.param((0, 4), (128, 128), id="no-rows"),
]


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 3, shape, generator=generator))
    if weight.numel():
        weight[0, :3] = -0.0
    return weight.to(dtype)


@pytest.mark.parametrize(("shape", "tile"), TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_references_both_ways(
    device: str,
    same_bits: Callable[..., bool],
    shape: tuple[int, ...],
    tile: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    weight = uneven(shape, dtype)
    codes, scale, fault = quantize_fp8(weight.to(device), block_shape=tile)
    expected_codes, expected_scale = fp8_block.quantize_fp8_block(weight, block_shape=tile)
    assert same_bits(scale, expected_scale)
    assert same_bits(codes, expected_codes)
    assert not fault
    out, fault = dequantize_fp8(codes, scale, block_shape=tile, dtype=dtype)
    back = fp8_block.dequantize_fp8_block(
        expected_codes, expected_scale, block_shape=tile, dtype=dtype
    )
    assert same_bits(out, back)
    assert not fault


def test_every_code_and_a_bfloat16_scale(device: str, same_bits: Callable[..., bool]) -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)[None]
    scale = torch.tensor([[0.3125]], dtype=torch.bfloat16)
    out, _ = dequantize_fp8(codes.to(device), scale.to(device), block_shape=(1, 254))
    assert same_bits(out, fp8_block.dequantize_fp8_block(codes, scale, block_shape=(1, 254)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_round_to_even(
    device: str, same_bits: Callable[..., bool], dtype: torch.dtype
) -> None:
    steps = torch.arange(0, 897).to(dtype) / 2  # all midpoints up to 448, which sets scale 1.0
    weight = torch.cat((steps, -steps / 256, steps / 2**14))[None].contiguous()
    codes, _, _ = quantize_fp8(weight.to(device), block_shape=(1, weight.shape[1]))
    assert same_bits(codes, fp8_block.quantize_fp8_block(weight, block_shape=weight.shape)[0])


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        pytest.param(0xFF, 1.0, id="nan-code"),
        pytest.param(0x38, -1.0, id="negative-scale"),
        pytest.param(0x38, 0.0, id="zero-scale"),
        pytest.param(0x38, float("nan"), id="nan-scale"),
        pytest.param(0x38, float("inf"), id="infinite-scale"),
        pytest.param(0x7E, 2.0**120, id="overflow"),
    ],
)
def test_what_cannot_be_decoded_is_flagged(device: str, byte: int, value: float) -> None:
    codes = torch.zeros(20, 300, dtype=torch.uint8, device=device)
    codes[19, 299] = byte
    scale = torch.ones(1, 3, device=device)
    scale[0, 2] = value
    assert dequantize_fp8(codes, scale, block_shape=(128, 128))[1]


def test_one_value_that_is_no_number_is_flagged(device: str) -> None:
    weight = torch.ones(130, 130, device=device)
    weight[129, 129] = -float("inf")
    assert quantize_fp8(weight, block_shape=(128, 128))[2]
