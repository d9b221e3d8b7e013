import pytest
import torch

from k3quant.eval.head_pair import score_pair


def _score(z, w, targets=None, step=1000):
    """Compare logits given row by row."""
    z, w = torch.as_tensor(z), torch.as_tensor(w)
    N, V = z.shape
    targets = torch.zeros(N, dtype=torch.int64) if targets is None else targets
    hidden = torch.eye(N)
    blocks = [
        [(first, logits.T[first : first + step].contiguous()) for first in range(0, V, step)]
        for logits in (z, w)
    ]
    return score_pair(hidden, hidden, targets, *blocks)


@pytest.mark.parametrize("step", [1, 2, 3], ids=lambda step: f"blocks-of-{step}")
def test_kl_is_of_the_candidate_from_the_reference(step):
    P, Q = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert _score(P, Q, step=step).kld.item() == pytest.approx(0.0851228260, abs=1e-7)
    assert _score(Q, P, step=step).kld.item() == pytest.approx(0.0920328502, abs=1e-7)


def test_logits_that_differ_by_a_constant_are_the_same_distribution():
    z = torch.tensor([[1.0, 2.0, 3.0]])
    assert _score(z, z + 4).kld.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_equal_logits_give_exactly_zero(step):
    z = 10 * torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    pair = _score(z, z.clone(), step=step)
    assert torch.equal(pair.kld, torch.zeros(20, dtype=torch.float64))
    assert bool(pair.same_top1.all())


@pytest.mark.parametrize("step", [1, 7, 40])
def test_scores_equal_those_of_whole_logits(step):
    rng = torch.Generator().manual_seed(1)
    z, w = 4 * torch.randn(2, 30, 40, generator=rng)
    targets = torch.randint(40, (30,), generator=rng)
    pair = _score(z, w, targets, step=step)
    logp, logq = z.double().log_softmax(-1), w.double().log_softmax(-1)
    torch.testing.assert_close(pair.kld, (logp.exp() * (logp - logq)).sum(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(pair.same_top1, z.argmax(-1) == w.argmax(-1))
    rows = torch.arange(30)
    torch.testing.assert_close(pair.reference_nll, -logp[rows, targets], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pair.candidate_nll, -logq[rows, targets], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_of_equal_logits_the_lowest_id_is_the_likeliest(step):
    pair = _score([[1.0, 3.0, 3.0, 0.0]], [[1.0, 3.0, 2.0, 0.0]], step=step)
    assert pair.same_top1.tolist() == [True]
