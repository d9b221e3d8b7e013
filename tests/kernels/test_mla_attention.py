from collections.abc import Callable

import pytest
import torch

from k3quant.kernels.mla_attention import mla_attend

HEADS, NOPE, ROPE, V_DIM, Q_RANK, KV_RANK = 6, 16, 8, 12, 20, 10


def reference(
    queried: torch.Tensor,
    q_weight: torch.Tensor,
    latent: torch.Tensor,
    kv_weight: torch.Tensor,
    k_rope: torch.Tensor,
) -> torch.Tensor:
    """All heads at once in float64, scores and all."""
    queried, q_weight, latent, kv_weight, k_rope = (
        x.double() for x in (queried, q_weight, latent, kv_weight, k_rope)
    )
    B, T, _ = queried.shape
    S = latent.shape[1]
    q = (queried @ q_weight.T).view(B, T, HEADS, NOPE + ROPE).transpose(1, 2)
    kv = (latent @ kv_weight.T).view(B, S, HEADS, NOPE + V_DIM).transpose(1, 2)
    k = torch.cat((kv[..., :NOPE], k_rope[:, None].expand(B, HEADS, S, ROPE)), dim=-1)
    ahead = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    scores = (q @ k.mT * (NOPE + ROPE) ** -0.5).masked_fill(ahead, float("-inf"))
    return (scores.softmax(dim=-1) @ kv[..., NOPE:]).transpose(1, 2)


@pytest.mark.parametrize(("new", "all_tokens"), [(9, 9), (1, 9), (3, 9)], ids=str)
@pytest.mark.parametrize("head_bytes", [0, 20_000, 1 << 30], ids=["one", "some", "all"])
@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_close_to_the_definition_whatever_heads_fit(
    error_ratio: Callable[..., float], where: str, head_bytes: int, new: int, all_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(21)
    dtype = torch.float32 if where == "cpu" else torch.bfloat16
    shapes = (
        (2, new, Q_RANK),
        (HEADS * (NOPE + ROPE), Q_RANK),
        (2, all_tokens, KV_RANK),
        (HEADS * (NOPE + V_DIM), KV_RANK),
        (2, all_tokens, ROPE),
    )
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    out = mla_attend(
        *(x.to(where) for x in inputs), heads=HEADS, nope=NOPE, v_dim=V_DIM, head_bytes=head_bytes
    )
    # In bfloat16 queries, keys, values and shares are rounded once each.
    assert error_ratio(out, reference(*inputs)) < (1e-6 if where == "cpu" else 2e-2)
