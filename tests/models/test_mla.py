import pytest
import torch

from k3quant.models import mla as mla_module
from k3quant.models.k3_config import MlaConfig
from k3quant.models.mla import mla_attention

D = 20


def _config(**changes):
    facts = {
        "num_heads": 3,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "mla_use_output_gate": True,
    }
    return MlaConfig(**(facts | changes))


def _weights(mla, seed=0):
    rng = torch.Generator().manual_seed(seed)
    H, kv, q = mla.num_heads, mla.kv_lora_rank, 12
    shapes = {
        "kv_a_proj_with_mqa": (kv + mla.qk_rope_head_dim, D),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (H * (mla.qk_nope_head_dim + mla.v_head_dim), kv),
        "o_proj": (D, H * mla.v_head_dim),
        "g_proj": (H * mla.v_head_dim, D),
        "q_proj": (H * mla.qk_head_dim, D),
        "q_a_proj": (q, D),
        "q_a_layernorm": (q,),
        "q_b_proj": (H * mla.qk_head_dim, q),
    }
    return {f"mla.{n}": 0.5 * torch.randn(s, generator=rng) for n, s in shapes.items()}


def _norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _token_by_token(x, w, mla):
    """Attend with loops over tokens and heads."""
    T, H = x.shape[0], mla.num_heads
    nope, rope, v_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
    out = torch.zeros(T, H, v_dim)
    compressed = x @ w["mla.kv_a_proj_with_mqa"].T
    latent = _norm(compressed[:, :-rope], w["mla.kv_a_layernorm"])
    shared = compressed[:, -rope:]
    kv = (latent @ w["mla.kv_b_proj"].T).reshape(T, H, nope + v_dim)
    q = x @ w["mla.q_proj"].T
    if mla.q_lora_rank is not None:
        q = _norm(x @ w["mla.q_a_proj"].T, w["mla.q_a_layernorm"]) @ w["mla.q_b_proj"].T
    q = q.reshape(T, H, nope + rope)
    for t in range(T):
        for h in range(H):
            scores = torch.stack(
                [q[t, h] @ torch.cat((kv[s, h, :nope], shared[s])) for s in range(t + 1)]
            )
            out[t, h] = torch.softmax(scores / (nope + rope) ** 0.5, 0) @ kv[: t + 1, h, nope:]
    flat = out.flatten(1)
    if mla.mla_use_output_gate:
        flat = flat * torch.sigmoid(x @ w["mla.g_proj"].T)
    return flat @ w["mla.o_proj"].T


@pytest.mark.parametrize("rank", [12, None], ids=["latent-queries", "plain-queries"])
@pytest.mark.parametrize("gate", [True, False], ids=["gated", "ungated"])
def test_attention_equals_its_formula_token_by_token(rank, gate):
    mla = _config(q_lora_rank=rank, mla_use_output_gate=gate)
    w, x = _weights(mla), torch.randn(2, 11, D, generator=torch.Generator().manual_seed(1))
    out, _ = mla_attention(x, w, mla)
    for b in range(2):
        torch.testing.assert_close(out[b], _token_by_token(x[b], w, mla), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 6, 10])
def test_attention_carries_its_cache_over_segments(cut):
    mla = _config()
    w, x = _weights(mla), torch.randn(2, 11, D)
    whole, last = mla_attention(x, w, mla)
    first, cache = mla_attention(x[:, :cut], w, mla)
    second, end = mla_attention(x[:, cut:], w, mla, cache=cache)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.kv_latent, last.kv_latent)
    assert end.k_rope.shape == (2, 11, 4)


@pytest.mark.parametrize("name", ["SCORE_ELEMENTS", "HEAD_ELEMENTS"])
def test_bounded_memory_changes_nothing(name, monkeypatch):
    mla = _config()
    w, x = _weights(mla), torch.randn(2, 30, D)
    whole, _ = mla_attention(x, w, mla)
    monkeypatch.setattr(mla_module, name, 400)
    torch.testing.assert_close(mla_attention(x, w, mla)[0], whole, rtol=1e-5, atol=1e-6)
