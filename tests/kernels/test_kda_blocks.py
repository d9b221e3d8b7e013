"""The small blocks around KDA's recurrence, and its single steps."""

from collections.abc import Callable

import pytest
import torch

from k3quant.kernels.kda_decode import kda_decode
from k3quant.kernels.rms_norm_gated import rms_norm_gated
from k3quant.kernels.short_conv import short_conv
from k3quant.models.delta_rule import recurrent_delta_rule
from k3quant.models.kda import short_convolution
from k3quant.models.norms import gated_rms_norm

# Sums run in another order; 16-bit results then differ where rounding nearly tied.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-4}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 24), (70, 128)], ids=["odd", "heads"])
def test_gated_norm(
    device: str, error_ratio: Callable[..., float], dtype: torch.dtype, rows: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(12)
    x = torch.randn((rows, width), generator=generator)
    weight = torch.rand(width, generator=generator).to(dtype)
    gate = (3 * torch.randn((rows, width), generator=generator)).to(dtype)
    out = rms_norm_gated(x.to(device), weight.to(device), gate.to(device), eps=1e-5)
    assert out.dtype == dtype
    assert error_ratio(out, gated_rms_norm(x, weight, gate, eps=1e-5)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 37], ids=str)
@pytest.mark.parametrize("has_state", [False, True], ids=["fresh", "continued"])
def test_short_convolution(
    device: str,
    error_ratio: Callable[..., float],
    same_bits: Callable[..., bool],
    dtype: torch.dtype,
    tokens: int,
    has_state: bool,
) -> None:
    generator = torch.Generator().manual_seed(13)
    u = torch.randn((2, tokens, 150), generator=generator).to(dtype)
    weight = torch.randn((150, 1, 4), generator=generator).to(dtype)
    before = torch.randn((2, 150, 4), generator=generator).to(dtype) if has_state else None
    out, after = short_conv(
        u.to(device), weight.to(device), None if before is None else before.to(device)
    )
    expected, expected_after = short_convolution(u, weight, before)
    assert same_bits(after, expected_after)
    assert out.shape == expected.shape
    if tokens:
        assert error_ratio(out, expected) < BOUND[dtype]


@pytest.mark.parametrize("tokens", [1, 3], ids=str)
@pytest.mark.parametrize("has_state", [False, True], ids=["fresh", "continued"])
def test_single_steps(
    device: str, error_ratio: Callable[..., float], tokens: int, has_state: bool
) -> None:
    generator = torch.Generator().manual_seed(14)
    B, T, H, K, V = 2, tokens, 3, 24, 40
    q, k = (torch.randn((B, T, H, K), generator=generator) for _ in range(2))
    k /= k.norm(dim=-1, keepdim=True)
    v = torch.randn((B, T, H, V), generator=generator)
    log_decay = -5 * torch.rand((B, T, H, K), generator=generator)
    beta = torch.rand((B, T, H), generator=generator)
    state = torch.randn((B, H, K, V), generator=generator) if has_state else None
    inputs = (q, k, v, log_decay, beta, state)
    out, after = kda_decode(*(x if x is None else x.to(device) for x in inputs))
    expected, expected_after = recurrent_delta_rule(*inputs)
    assert error_ratio(out, expected) < 2e-6
    assert error_ratio(after, expected_after) < 2e-6
