from collections.abc import Callable

import pytest
import torch

from k3quant.kernels import kda_prefill
from k3quant.models.delta_rule import chunked_delta_rule, recurrent_delta_rule

B, H, K = 2, 3, 32


def inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(20)
    q, k, v = (torch.randn((B, tokens, H, K), generator=generator) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = -torch.rand((B, tokens, H, K), generator=generator)
    beta = torch.rand((B, tokens, H), generator=generator)
    state = torch.randn((B, H, K, K), generator=generator)
    return [(q * K**-0.5).to(dtype), k.to(dtype), v.to(dtype), log_decay, beta, state]


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the reference in fla's place and note the length of each call."""
    seen: list[int] = []

    def chunk_kda(q, k, v, g, beta, *, scale, initial_state, output_final_state, safe_gate):
        assert scale == 1.0
        assert output_final_state
        assert safe_gate
        seen.append(q.shape[1])
        return chunked_delta_rule(q, k, v, g, beta, initial_state)

    monkeypatch.setattr(kda_prefill, "_chunk_kda", lambda: chunk_kda)
    return seen


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        pytest.param(200, 1 << 30, [200], id="one-call"),
        pytest.param(200, 0, [64, 64, 64, 8], id="a-chunk-at-a-time"),
        pytest.param(256, 130 * B * H * K * 20, [128, 128], id="two-chunks-at-a-time"),
    ],
)
def test_state_goes_from_segment_to_segment(
    lengths: list[int],
    error_ratio: Callable[..., float],
    tokens: int,
    budget: int,
    expected: list[int],
) -> None:
    everything = inputs(tokens, torch.float32)
    out, state = kda_prefill.kda_prefill(*everything, bounded=True, scratch_bytes=budget)
    assert lengths == expected
    whole, whole_state = recurrent_delta_rule(*everything)
    assert error_ratio(out, whole) < 1e-5
    assert error_ratio(state, whole_state) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1 << 30, 0], ids=["one-call", "segments"])
def test_fla_agrees_with_the_reference(
    error_ratio: Callable[..., float], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    pytest.importorskip("fla")
    everything = [x.cuda() for x in inputs(300, torch.bfloat16)]
    out, state = kda_prefill.kda_prefill(*everything, bounded=True, scratch_bytes=budget)
    whole, whole_state = recurrent_delta_rule(*(x.float().cpu() for x in everything))
    # fla multiplies in bfloat16: about 2^-9 a product, summed over chunks.
    assert error_ratio(out, whole) < 1e-2
    assert error_ratio(state, whole_state) < 1e-2
