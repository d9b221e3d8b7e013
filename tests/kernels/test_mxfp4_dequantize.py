from collections.abc import Callable

import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats import mxfp4
from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4

DTYPES = [
    pytest.param(torch.bfloat16, 253, id="bfloat16"),
    pytest.param(torch.float32, 253, id="float32"),
    pytest.param(torch.float16, 141, id="float16"),
]


def random_mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    *lead, cols = shape
    packed = torch.randint(0, 256, (*lead, cols // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 141, (*lead, cols // 32), dtype=torch.uint8, generator=generator)
    return packed, scales


@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_every_byte_under_every_scale_is_exact(
    device: str, same_bits: Callable[..., bool], dtype: torch.dtype, scales: int
) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(scales).reshape(-1, 16)
    scale_e8m0 = torch.arange(scales, dtype=torch.uint8).repeat_interleave(16).reshape(-1, 1)
    out, suspect = dequantize_mxfp4(packed.to(device), scale_e8m0.to(device), dtype=dtype)
    assert same_bits(out, mxfp4.dequantize_mxfp4(packed, scale_e8m0, dtype=dtype))
    assert not suspect


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
    packed, scale_e8m0 = random_mxfp4(*shape)
    out, _ = dequantize_mxfp4(packed.to(device), scale_e8m0.to(device))
    assert same_bits(out, mxfp4.dequantize_mxfp4(packed, scale_e8m0))


@pytest.mark.parametrize("experts", [[], [4], [3, 0, 3]], ids=["none", "one", "repeated"])
def test_only_the_listed_experts_are_decoded(
    device: str, same_bits: Callable[..., bool], experts: list[int]
) -> None:
    packed, scale_e8m0 = random_mxfp4(5, 9, 160)
    scale_e8m0[1] = 255  # of an expert nobody asks for
    wanted = torch.tensor(experts, dtype=torch.int64)
    out, suspect = dequantize_mxfp4(
        packed.to(device), scale_e8m0.to(device), experts=wanted.to(device)
    )
    assert same_bits(out, mxfp4.dequantize_mxfp4(packed[wanted], scale_e8m0[wanted]))
    assert not suspect


def test_a_given_output_is_filled(device: str, same_bits: Callable[..., bool]) -> None:
    packed, scale_e8m0 = random_mxfp4(2, 7, 64)
    buffer = torch.full((4, 7, 64), float("nan"), dtype=torch.bfloat16, device=device)
    dequantize_mxfp4(packed.to(device), scale_e8m0.to(device), out=buffer[1:3])
    assert same_bits(buffer[1:3], mxfp4.dequantize_mxfp4(packed, scale_e8m0))
    assert torch.isnan(buffer[0]).all()
    assert torch.isnan(buffer[3]).all()


@pytest.mark.parametrize(
    ("dtype", "byte", "suspect"),
    [
        pytest.param(torch.bfloat16, 252, False, id="largest-safe-bfloat16"),
        pytest.param(torch.bfloat16, 253, True, id="may-overflow-bfloat16"),
        pytest.param(torch.float32, 255, True, id="nan"),
        pytest.param(torch.float16, 140, False, id="largest-safe-float16"),
        pytest.param(torch.float16, 141, True, id="may-overflow-float16"),
    ],
)
def test_one_bad_scale_is_flagged(
    device: str, dtype: torch.dtype, byte: int, suspect: bool
) -> None:
    packed, scale_e8m0 = random_mxfp4(30, 320)
    scale_e8m0[17, 3] = byte
    _, flag = dequantize_mxfp4(packed.to(device), scale_e8m0.to(device), dtype=dtype)
    assert bool(flag) == suspect


def test_nan_scale_gives_nan(device: str) -> None:
    packed = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    scale_e8m0 = torch.full((1, 1), 255, dtype=torch.uint8)
    out, _ = dequantize_mxfp4(packed.to(device), scale_e8m0.to(device))
    assert torch.isnan(out).all()


def test_a_scale_grid_that_does_not_fit_is_refused(device: str) -> None:
    packed, scale_e8m0 = random_mxfp4(3, 64)
    with pytest.raises(SchemaError, match=r"scale grid: expected \[3, 2\], got \[2, 2\]"):
        dequantize_mxfp4(packed.to(device), scale_e8m0[:2].to(device))
