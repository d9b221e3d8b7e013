from collections.abc import Callable

import pytest
import torch

from k3quant.kernels.situ_and_mul import situ_and_mul
from k3quant.models.situ import situ

BOUNDS = {"beta": 4.0, "linear_beta": 25.0}

# The approximate exponential and reciprocal are good to 2 units of float32 each, and four of them
# meet; in 16 bits the result differs only where rounding was a near tie.
CASES = [
    pytest.param(torch.float32, 1e-6, id="float32"),
    pytest.param(torch.bfloat16, 4e-4, id="bfloat16"),
    pytest.param(torch.float16, 1e-4, id="float16"),
]


@pytest.mark.parametrize(("dtype", "bound"), CASES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0], ids=["tiny", "usual", "saturated"])
def test_close_to_the_reference(
    device: str, error_ratio: Callable[..., float], dtype: torch.dtype, bound: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(10)
    both = (torch.randn((7, 2300), generator=generator) * spread).to(dtype).to(device)
    gate, up = both[:, :1150], both[:, 1150:]  # rows lie apart
    out = situ_and_mul(gate, up, **BOUNDS)
    assert out.dtype == dtype
    assert error_ratio(out, situ(gate.cpu(), up.cpu(), **BOUNDS)) < bound


def test_far_ends(device: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e4, -1e4, float("inf"), float("nan"), 1.0]], device=device)
    up = torch.full_like(gate, 1e6)
    out = situ_and_mul(gate, up, **BOUNDS).cpu()
    expected = situ(gate.cpu(), up.cpu(), **BOUNDS)
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_no_rows(device: str) -> None:
    empty = torch.zeros(0, 8, device=device)
    assert situ_and_mul(empty, empty, **BOUNDS).shape == (0, 8)
