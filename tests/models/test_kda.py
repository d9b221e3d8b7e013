import math

import pytest
import torch
from torch.nn.functional import silu

from k3quant.models.delta_rule import chunked_delta_rule, recurrent_delta_rule
from k3quant.models.k3_config import KdaConfig
from k3quant.models.kda import decay_of, kda_attention, short_convolution


def _config(**changes):
    facts = {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }
    return KdaConfig(**(facts | changes))


def _weights(kda, D=10, seed=0):
    rng = torch.Generator().manual_seed(seed)
    H, K, W = kda.num_heads, kda.head_dim, kda.width
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (W, D))
    taps = (W, 1, kda.short_conv_kernel_size)
    shapes |= dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), taps)
    shapes |= {"o_proj": (D, W), "b_proj": (H, D)}
    shapes |= {"f_a_proj": (K, D), "f_b_proj": (W, K), "g_a_proj": (K, D), "g_b_proj": (W, K)}
    shapes |= {"A_log": (max(H, K),), "dt_bias": (W,), "o_norm": (K,)}
    return {f"kda.{n}": 0.5 * torch.randn(s, generator=rng) for n, s in shapes.items()}


@pytest.mark.parametrize(
    "shape", [(1,), (8,), (1, 1, 1, 1)], ids=["heads", "padded", "kimi-linear"]
)
def test_bounded_decay_has_the_published_value_for_every_stored_shape(shape):
    A_log = torch.zeros(shape)
    A_log.flatten()[0] = math.log(2)
    kda = _config(num_heads=1, head_dim=1)
    log_decay = decay_of(torch.full((1, 1, 1, 1), 0.3), A_log, torch.full((1,), 0.2), kda)
    assert log_decay.item() == pytest.approx(-3.6552928932, rel=1e-6)
    assert log_decay.exp().item() == pytest.approx(0.0258539239, rel=1e-6)


def test_unbounded_decay_is_minus_rate_times_softplus():
    kda = _config(num_heads=1, head_dim=1, gate_lower_bound=None)
    log_decay = decay_of(
        torch.full((1, 1, 1, 1), 0.3), torch.tensor([math.log(2)]), torch.full((1,), 0.2), kda
    )
    assert log_decay.item() == pytest.approx(-1.9481539684, rel=1e-6)


def test_decay_ignores_what_pads_the_heads():
    kda, r = _config(), torch.randn(1, 2, 3, 8)
    A_log = torch.randn(8)
    padded = torch.cat((A_log[:3], torch.full((5,), float("nan"))))
    dt_bias = torch.randn(24)
    assert torch.equal(decay_of(r, padded, dt_bias, kda), decay_of(r, A_log[:3], dt_bias, kda))


@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_is_causal_with_the_newest_tap_last(taps):
    rng = torch.Generator().manual_seed(1)
    u = torch.randn(2, 9, 5, generator=rng)
    weight = torch.randn(5, 1, taps, generator=rng)
    out, last = short_convolution(u, weight, None)
    for b in range(2):
        for t in range(9):
            total = sum(
                weight[:, 0, j] * u[b, t - taps + 1 + j]
                for j in range(taps)
                if t - taps + 1 + j >= 0
            )
            torch.testing.assert_close(out[b, t], silu(total))
    assert torch.equal(last, u[:, -taps:].mT)


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_convolution_carries_its_last_inputs(cut):
    u, weight = torch.randn(1, 9, 5), torch.randn(5, 1, 4)
    whole, last = short_convolution(u, weight, None)
    first, state = short_convolution(u[:, :cut], weight, None)
    second, end = short_convolution(u[:, cut:], weight, state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    assert torch.equal(end, last)


@pytest.mark.parametrize("full_rank", [True, False], ids=["full-rank-gate", "low-rank-gate"])
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
def test_attention_equals_its_formula_token_by_token(full_rank, bound):
    kda = _config(use_full_rank_gate=full_rank, gate_lower_bound=bound)
    w, x = _weights(kda), torch.randn(1, 21, 10, generator=torch.Generator().manual_seed(2))
    out, cache = kda_attention(x, w, kda, norm_eps=1e-5)
    H, K = 3, 8
    raw = {p: x[0] @ w[f"kda.{p}_proj"].T for p in "qkv"}
    S = torch.zeros(H, K, K)
    for t in range(21):
        part = {}
        for p in "qkv":
            before = torch.cat((torch.zeros(3, H * K), raw[p]))[t : t + 4]
            part[p] = silu((before * w[f"kda.{p}_conv1d"][:, 0].T).sum(0)).reshape(H, K)
        q, k = (part[p] / (part[p].square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in "qk")
        shifted = w["kda.f_b_proj"] @ (w["kda.f_a_proj"] @ x[0, t]) + w["kda.dt_bias"]
        rate = w["kda.A_log"][:H].exp()[:, None]
        shifted = shifted.reshape(H, K)
        if bound is None:
            decay = (-rate * torch.log1p(shifted.exp())).exp()
        else:
            decay = (bound / (1 + (-rate * shifted).exp())).exp()
        beta = torch.sigmoid(w["kda.b_proj"] @ x[0, t])
        gate = w["kda.g_proj"] @ x[0, t]
        if not full_rank:
            gate = w["kda.g_b_proj"] @ (w["kda.g_a_proj"] @ x[0, t])
        o = torch.empty(H, K)
        for h in range(H):
            S[h] = decay[h][:, None] * S[h]
            S[h] = S[h] + torch.outer(k[h], beta[h] * (part["v"][h] - k[h] @ S[h]))
            o[h] = K**-0.5 * q[h] @ S[h]
        normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["kda.o_norm"]
        y = w["kda.o_proj"] @ (normed.flatten() * torch.sigmoid(gate))
        torch.testing.assert_close(out[0, t], y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.state[0], S, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 5, 64, 70])
def test_attention_carries_its_cache_over_segments(cut):
    kda = _config()
    w, x = _weights(kda), torch.randn(2, 75, 10)
    whole, last = kda_attention(x, w, kda, norm_eps=1e-5)
    first, cache = kda_attention(x[:, :cut], w, kda, norm_eps=1e-5)
    second, end = kda_attention(x[:, cut:], w, kda, norm_eps=1e-5, cache=cache)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.state, last.state, rtol=1e-4, atol=1e-5)


def test_attention_is_the_same_in_either_form_of_the_recurrence():
    kda = _config()
    w, x = _weights(kda), torch.randn(2, 50, 10)
    outputs = [
        kda_attention(x, w, kda, norm_eps=1e-5, delta_rule=form)[0]
        for form in (recurrent_delta_rule, chunked_delta_rule)
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
