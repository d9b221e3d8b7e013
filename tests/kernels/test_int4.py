from collections.abc import Callable

import pytest
import torch

from k3quant.errors import SchemaError, UsageError
from k3quant.formats import int4
from k3quant.formats.int4 import Int4Range
from k3quant.kernels.int4_dequantize import dequantize_int4
from k3quant.kernels.int4_quantize import quantize_int4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRIDS = [pytest.param(grid, id=grid.value) for grid in Int4Range]


def uneven(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn((3, 7, 128), generator=generator)
    weight *= torch.exp2(torch.randint(-8, 3, (3, 7, 128), generator=generator))
    weight[0, 0] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [8, 32], ids=str)
def test_bits_are_the_references_both_ways(
    device: str,
    same_bits: Callable[..., bool],
    grid: Int4Range,
    dtype: torch.dtype,
    group_size: int,
) -> None:
    weight = uneven(dtype)
    packed, scale, fault = quantize_int4(
        weight.to(device), group_size=group_size, grid=grid, scale_dtype=dtype
    )
    expected_packed, expected_scale = int4.quantize_int4(
        weight, group_size=group_size, grid=grid, scale_dtype=dtype
    )
    assert same_bits(scale, expected_scale)
    assert same_bits(packed, expected_packed)
    assert not fault
    out, fault = dequantize_int4(packed, scale, group_size=group_size, dtype=dtype)
    back = int4.dequantize_int4(
        expected_packed, expected_scale, cols=128, group_size=group_size, dtype=dtype
    )
    assert same_bits(out, back)
    assert not fault


def test_halves_round_to_even(device: str, same_bits: Callable[..., bool]) -> None:
    weight = torch.arange(-16, 16)[None] / 2 + 0.0
    weight[0, 0] = 7.0  # under BALANCED the scale is 8 / 7 or 1
    weight[0, 1] = -7.0
    weight[weight.abs() > 7] = 0
    kwargs = {"group_size": 32, "grid": Int4Range.BALANCED, "scale_dtype": torch.float32}
    packed, _, _ = quantize_int4(weight.to(device), **kwargs)
    assert same_bits(packed, int4.quantize_int4(weight, **kwargs)[0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 3e38], ids=str)
def test_what_cannot_be_decoded_is_flagged(device: str, value: float) -> None:
    packed = torch.full((600, 4), 0x0FFFFFFF, dtype=torch.int32, device=device)
    scale = torch.ones(600, 1, device=device)
    scale[599] = value
    assert dequantize_int4(packed, scale, group_size=32)[1]


def test_one_value_that_is_no_number_is_flagged(device: str) -> None:
    weight = torch.ones(300, 32, device=device)
    weight[299, 31] = float("nan")
    assert quantize_int4(weight, group_size=32, grid=Int4Range.FULL, scale_dtype=torch.float32)[2]


def test_group_sizes_that_do_not_fit_are_refused(device: str) -> None:
    weight = torch.ones(3, 48, device=device)
    kwargs = {"grid": Int4Range.FULL, "scale_dtype": torch.float32}
    with pytest.raises(UsageError, match="expected a power of two from 8 to 1024 on a GPU, got 24"):
        quantize_int4(weight, group_size=24, **kwargs)
    with pytest.raises(SchemaError, match="columns: expected a multiple of 32, got 48"):
        quantize_int4(weight, group_size=32, **kwargs)
