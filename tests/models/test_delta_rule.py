import numpy as np
import pytest
import torch

from k3quant.models.delta_rule import chunked_delta_rule, recurrent_delta_rule

FORMS = pytest.mark.parametrize(
    "form", [recurrent_delta_rule, chunked_delta_rule], ids=["recurrent", "chunked"]
)


def _problem(*, T, K=8, V=12, B=2, H=3, decay="bounded", seed=0):
    rng = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, B, T, H, K, generator=rng)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(B, T, H, V, generator=rng)
    uniform = torch.rand(B, T, H, K, generator=rng)
    log_decay = {
        "none": torch.zeros_like(uniform),
        "bounded": -5 * uniform,
        "always-five": torch.full_like(uniform, -5.0),
        "mild": -0.01 * uniform,
        "strong-and-mild": torch.where(uniform > 0.5, -1e6 * uniform, -1e-3 * uniform),
        "forgets-all": torch.where(uniform > 0.9, -float("inf"), -uniform),
    }[decay]
    beta = torch.rand(B, T, H, generator=rng)
    state = torch.randn(B, H, K, V, generator=rng)
    return q, k, v, log_decay, beta, state


def _loops(q, k, v, log_decay, beta, state):
    """Compute the definition element by element in float64."""
    q, k, v, log_decay, beta, S = (x.double().numpy() for x in (q, k, v, log_decay, beta, state))
    S = S.copy()
    out = np.zeros(v.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        S[b, h] *= np.exp(log_decay[b, t, h])[:, None]
        u = beta[b, t, h] * (v[b, t, h] - k[b, t, h] @ S[b, h])
        S[b, h] += np.outer(k[b, t, h], u)
        out[b, t, h] = q[b, t, h] @ S[b, h]
    return torch.from_numpy(out).float(), torch.from_numpy(S).float()


@FORMS
def test_decay_comes_first_and_the_output_reads_the_new_state(form):
    decay = torch.tensor([0.5, 0.25]).log()
    q, k, v = torch.ones(2), torch.tensor([1.0, 0.0]), torch.ones(2)
    token = [x.reshape(1, 1, 1, 2) for x in (q, k, v, decay)]
    out, state = form(*token, torch.full((1, 1, 1), 0.5), torch.eye(2).reshape(1, 1, 2, 2))
    torch.testing.assert_close(state[0, 0], torch.tensor([[0.75, 0.5], [0.0, 0.25]]))
    torch.testing.assert_close(out.flatten(), torch.tensor([0.75, 0.75]))


@FORMS
@pytest.mark.parametrize(
    ("K", "V"), [(8, 12), (12, 4), (8, 8)], ids=["wide-values", "wide-keys", "square"]
)
def test_both_forms_equal_the_definition(form, K, V):
    problem = _problem(T=37, K=K, V=V)
    for got, expected in zip(form(*problem), _loops(*problem), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
def test_chunked_equals_recurrent_at_any_length(T, chunk):
    problem = _problem(T=T)
    pairs = zip(
        chunked_delta_rule(*problem, chunk=chunk), recurrent_delta_rule(*problem), strict=True
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "decay", ["none", "mild", "bounded", "always-five", "strong-and-mild", "forgets-all"]
)
def test_chunked_equals_recurrent_under_any_decay(decay):
    problem = _problem(T=200, decay=decay)
    pairs = zip(chunked_delta_rule(*problem), recurrent_delta_rule(*problem), strict=True)
    for got, expected in pairs:
        assert torch.isfinite(got).all()
        # Without decay the sums grow with T, so the bound is relative to their size.
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


def test_chunked_stays_exact_where_all_keys_are_equal():
    q, k, v, log_decay, _, state = _problem(T=64, decay="none")
    k = k[:, :1].expand_as(k)
    problem = (q, k, v, log_decay, torch.ones(k.shape[:3]), state)
    for got, expected in zip(chunked_delta_rule(*problem), _loops(*problem), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@FORMS
@pytest.mark.parametrize("cut", [1, 16, 40, 64], ids=lambda cut: f"cut-at-{cut}")
def test_state_carries_over_between_segments(form, cut):
    *inputs, state = _problem(T=97)
    whole, last = form(*inputs, state)
    first, middle = form(*(x[:, :cut] for x in inputs), state)
    second, end = form(*(x[:, cut:] for x in inputs), middle)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(end, last, rtol=1e-5, atol=2e-5)


@FORMS
def test_no_state_is_a_state_of_zeros(form):
    *inputs, state = _problem(T=20)
    for got, expected in zip(form(*inputs), form(*inputs, torch.zeros_like(state)), strict=True):
        assert torch.equal(got, expected)


@FORMS
def test_no_tokens_leave_the_state(form):
    *inputs, state = _problem(T=4)
    out, after = form(*(x[:, :0] for x in inputs), state)
    assert out.shape[1] == 0
    assert torch.equal(after, state)


@pytest.mark.parametrize("chunk", [0, 8, 24, 65])
def test_a_chunk_that_is_no_multiple_of_a_tile_is_refused(chunk):
    with pytest.raises(ValueError, match="multiple of 16"):
        chunked_delta_rule(*_problem(T=4), chunk=chunk)
