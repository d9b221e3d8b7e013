from collections.abc import Callable

import pytest
import torch

from k3quant.kernels.attn_res_mix import attn_res_mix
from k3quant.models.residual import Residual, mix_blocks

# Sums over the width run in another order; 16-bit results then differ where rounding nearly tied.
CASES = [
    pytest.param(torch.float32, 2e-6, id="float32"),
    pytest.param(torch.bfloat16, 4e-4, id="bfloat16"),
]


@pytest.mark.parametrize(("dtype", "bound"), CASES)
@pytest.mark.parametrize("count", [1, 2, 9], ids=str)
@pytest.mark.parametrize("width", [32, 70], ids=str)
def test_close_to_the_reference(
    device: str,
    error_ratio: Callable[..., float],
    dtype: torch.dtype,
    bound: float,
    count: int,
    width: int,
) -> None:
    generator = torch.Generator().manual_seed(11)
    sources = [torch.randn((5, width), generator=generator).to(dtype) for _ in range(count)]
    norm, proj = (
        torch.rand(width, generator=generator),
        torch.randn((1, width), generator=generator),
    )
    out = attn_res_mix([s.to(device) for s in sources], norm.to(device), proj.to(device), eps=1e-5)
    assert out.dtype == dtype
    expected = mix_blocks(Residual(sources[-1], tuple(sources[:-1])), norm, proj, eps=1e-5)
    assert error_ratio(out, expected) < bound


def test_a_dominant_source_is_returned_whole(device: str) -> None:
    sources = [torch.full((3, 64), value, device=device) for value in (-1.0, 1.0, -1.0)]
    ones = torch.ones(64, device=device)
    out = attn_res_mix(sources, ones, 100 * ones[None], eps=1e-5)
    assert torch.allclose(out, sources[1], rtol=1e-6, atol=0)


def test_tokens_of_one_program_do_not_meet(device: str, error_ratio: Callable[..., float]) -> None:
    generator = torch.Generator().manual_seed(12)
    sources = [torch.randn((40, 32), generator=generator) for _ in range(3)]
    sources[1][5] = float("nan")
    norm, proj = torch.rand(32, generator=generator), torch.randn((1, 32), generator=generator)
    out = attn_res_mix([s.to(device) for s in sources], norm.to(device), proj.to(device), eps=1e-5)
    out = out.cpu()
    expected = mix_blocks(Residual(sources[-1], tuple(sources[:-1])), norm, proj, eps=1e-5)
    others = torch.arange(40) != 5
    assert out[5].isnan().all()
    assert error_ratio(out[others], expected[others]) < 2e-6


@pytest.mark.parametrize("count", [0, 10], ids=str)
def test_only_one_to_nine_sources(device: str, count: int) -> None:
    x = torch.zeros(1, 8, device=device)
    with pytest.raises(ValueError, match=f"sources: expected 1 to 9, got {count}"):
        attn_res_mix([x] * count, x[0], x, eps=1e-5)
