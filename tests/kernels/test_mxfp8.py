from collections.abc import Callable

import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats import mxfp8
from k3quant.formats.mx import ScaleRounding
from k3quant.kernels.mxfp8_dequantize import dequantize_mxfp8
from k3quant.kernels.mxfp8_quantize import quantize_mxfp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def uneven(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of many magnitudes, a zero block, a tiny one and one near the dtype's end."""
    generator = torch.Generator().manual_seed(31)
    weight = torch.randn((37, 5, 64), generator=generator)
    weight *= torch.exp2(torch.randint(-12, 3, (37, 5, 64), generator=generator))
    weight[0, 0] = -0.0
    weight[1, 2, :32] *= torch.finfo(dtype).tiny / 16
    weight[2, 3, 32:] *= torch.finfo(dtype).max / weight[2, 3, 32:].abs().max() * 0.99
    return weight.to(dtype)


@pytest.mark.parametrize("rule", list(ScaleRounding), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_bits_are_the_references(
    device: str, same_bits: Callable[..., bool], rule: ScaleRounding, dtype: torch.dtype
) -> None:
    weight = uneven(dtype)
    codes, scale_e8m0, fault = quantize_mxfp8(weight.to(device), rule)
    expected_codes, expected_scale = mxfp8.quantize_mxfp8(weight, rule)
    assert same_bits(scale_e8m0, expected_scale)
    assert same_bits(codes, expected_codes)
    assert not fault


def test_ties_round_to_even(device: str, same_bits: Callable[..., bool]) -> None:
    steps = torch.arange(0, 896).bfloat16() / 2  # all midpoints up to 448, which sets byte 127
    weight = torch.cat((steps, -steps)).reshape(-1, 32).contiguous()
    weight[:, 0] = 256
    codes, _, _ = quantize_mxfp8(weight.to(device), ScaleRounding.FLOOR)
    assert same_bits(codes, mxfp8.quantize_mxfp8(weight, ScaleRounding.FLOOR)[0])


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        pytest.param(torch.float32, range(247), id="float32"),
        pytest.param(torch.bfloat16, range(247), id="bfloat16"),
        pytest.param(torch.float16, range(135), id="float16"),
    ],
)
def test_every_code_under_every_scale(
    device: str, same_bits: Callable[..., bool], dtype: torch.dtype, scales: range
) -> None:
    numbers = [c for c in range(256) if c & 0x7F != 0x7F]
    row = torch.tensor([*numbers, 0, 0], dtype=torch.uint8)
    codes = row.repeat(len(scales), 1)
    scale_e8m0 = torch.tensor(list(scales), dtype=torch.uint8)[:, None].repeat(1, 8)
    out, suspect = dequantize_mxfp8(codes.to(device), scale_e8m0.to(device), dtype=dtype)
    assert same_bits(out, mxfp8.dequantize_mxfp8(codes, scale_e8m0, dtype=dtype))
    assert not suspect


@pytest.mark.parametrize(
    ("code", "byte"),
    [
        pytest.param(0x7F, 120, id="nan-code"),
        pytest.param(0xFF, 120, id="negative-nan-code"),
        pytest.param(0x38, 255, id="nan-scale"),
        pytest.param(0x7E, 247, id="overflow"),
    ],
)
def test_what_cannot_be_decoded_is_flagged(device: str, code: int, byte: int) -> None:
    codes = torch.zeros(300, 32, dtype=torch.uint8, device=device)
    scale_e8m0 = torch.full((300, 1), 120, dtype=torch.uint8, device=device)
    codes[299, 31], scale_e8m0[299] = code, byte
    assert dequantize_mxfp8(codes, scale_e8m0)[1]


def test_one_value_that_is_no_number_is_flagged(device: str) -> None:
    weight = torch.ones(200, 32, device=device)
    weight[199, 31] = float("nan")
    assert quantize_mxfp8(weight, ScaleRounding.EVEN)[2]


def test_shapes(device: str) -> None:
    codes, scale_e8m0, _ = quantize_mxfp8(torch.zeros(0, 64, device=device), ScaleRounding.EVEN)
    assert dequantize_mxfp8(codes, scale_e8m0)[0].shape == (0, 64)
    with pytest.raises(SchemaError, match="columns: expected a multiple of 32, got 40"):
        quantize_mxfp8(torch.zeros(2, 40, device=device), ScaleRounding.EVEN)
