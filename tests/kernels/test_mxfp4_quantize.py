from collections.abc import Callable

import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats import mxfp4
from k3quant.formats.mx import ScaleRounding
from k3quant.kernels.mxfp4_quantize import quantize_mxfp4

RULES = [pytest.param(rule, id=rule.value) for rule in ScaleRounding]


def every_bfloat16() -> torch.Tensor:
    """All finite values, so that a block spans a sixteenth of an octave."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[torch.isfinite(values)]
    return values[: len(values) // 32 * 32].reshape(-1, 32)


def ties(dtype: torch.dtype) -> torch.Tensor:
    """Multiples of a quarter up to eight, which hold all midpoints, and their neighbours."""
    generator = torch.Generator().manual_seed(1)
    quarters = torch.randint(-32, 33, (256, 32), generator=generator) / 4
    nudge = torch.randint(-1, 2, (256, 32), generator=generator) * torch.finfo(dtype).eps
    octave = torch.randint(-10, 8, (256, 1), generator=generator)
    return (quarters * (1 + nudge) * torch.exp2(octave)).to(dtype)


def wide(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of every magnitude the dtype has, subnormal to largest."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn((256, 32), generator=generator).double()
    info = torch.finfo(dtype)
    low, high = torch.tensor([info.smallest_normal, info.max]).double().log2().tolist()
    octave = torch.linspace(low - 12, high - 2.5, 256).double()[:, None]
    return (values * torch.exp2(octave)).clamp(info.min, info.max).to(dtype)


def check(
    device: str, same_bits: Callable[..., bool], weight: torch.Tensor, rule: ScaleRounding
) -> None:
    packed, scale_e8m0, fault = quantize_mxfp4(weight.to(device), rule)
    expected_packed, expected_scale = mxfp4.quantize_mxfp4(weight, rule)
    assert same_bits(scale_e8m0, expected_scale)
    assert same_bits(packed, expected_packed)
    assert not fault


@pytest.mark.parametrize("rule", RULES)
def test_every_bfloat16_is_rounded_as_the_reference_does(
    device: str, same_bits: Callable[..., bool], rule: ScaleRounding
) -> None:
    check(device, same_bits, every_bfloat16(), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ties_and_their_neighbours(
    device: str, same_bits: Callable[..., bool], rule: ScaleRounding, dtype: torch.dtype
) -> None:
    check(device, same_bits, ties(dtype), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_from_subnormals_to_the_largest_values(
    device: str, same_bits: Callable[..., bool], rule: ScaleRounding, dtype: torch.dtype
) -> None:
    check(device, same_bits, wide(dtype), rule)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((32,), id="one-block"),
        pytest.param((3, 5, 96), id="batch"),
        pytest.param((129, 32), id="one-block-more-than-a-program"),
        pytest.param((0, 64), id="no-rows"),
    ],
)
def test_odd_sizes(device: str, same_bits: Callable[..., bool], shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    check(device, same_bits, weight, ScaleRounding.EVEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_blocks_keep_signs_under_scale_zero(
    device: str, same_bits: Callable[..., bool], dtype: torch.dtype
) -> None:
    weight = torch.zeros(3, 64, dtype=dtype)
    weight[1] = -0.0
    weight[2, 40] = 1.0
    check(device, same_bits, weight, ScaleRounding.FLOOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_one_value_that_is_no_number_is_flagged(
    device: str, dtype: torch.dtype, value: float
) -> None:
    weight = torch.ones(200, 32, dtype=dtype)
    weight[150, 31] = value
    assert quantize_mxfp4(weight.to(device), ScaleRounding.FLOOR)[2]


def test_columns_that_are_no_blocks_are_refused(device: str) -> None:
    with pytest.raises(SchemaError, match="columns: expected a multiple of 32, got 48"):
        quantize_mxfp4(torch.zeros(2, 48, device=device), ScaleRounding.FLOOR)
