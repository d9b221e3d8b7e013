import math
import subprocess
import sys
import textwrap

import pytest
import torch

from k3quant.eval import head as head_module
from k3quant.eval.head import negative_log_likelihood


def _blocks(weight, step):
    return [(first, weight[first : first + step]) for first in range(0, len(weight), step)]


def test_loss_is_float32_although_the_activations_are_bfloat16():
    # Rounded to bfloat16 the two logits would be equal and the loss ln 2.
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[20.03], [20.0]])
    nll = negative_log_likelihood(hidden, torch.tensor([0]), [(0, weight)])
    assert nll.item() == pytest.approx(0.6782596763, abs=1e-6)


@pytest.mark.parametrize("step", [1, 7, 50, 64], ids=lambda step: f"blocks-of-{step}")
@pytest.mark.parametrize("elements", [1, 100, 1 << 22], ids=lambda n: f"{n}-logits-at-once")
def test_any_blocks_give_the_cross_entropy(step, elements, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 6, generator=rng), 5 * torch.randn(50, 6, generator=rng)
    targets = torch.randint(50, (9,), generator=rng)
    logits = (hidden @ weight.T).double()
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    monkeypatch.setattr(head_module, "LOGIT_ELEMENTS", elements)
    nll = negative_log_likelihood(hidden, targets, _blocks(weight, step))
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow():
    weight = torch.tensor([[1e4], [2e4], [-1e4]])
    nll = negative_log_likelihood(torch.ones(1, 1), torch.tensor([0]), _blocks(weight, 1))
    assert nll.item() == pytest.approx(1e4)


def test_a_nan_logit_shows_in_the_result():
    weight = torch.tensor([[1.0], [math.nan], [2.0]])
    nll = negative_log_likelihood(torch.ones(1, 1), torch.tensor([0]), _blocks(weight, 2))
    assert math.isnan(nll.item())


def test_long_context_times_vocabulary_stays_below_two_gibibytes():
    # 16384 x 163840 logits are more than 2^31; whole, in float32, they would be 10 GiB.
    script = """
        import resource, torch
        from k3quant.eval.head import negative_log_likelihood
        torch.set_num_threads(1)
        rng = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(16384, 2, generator=rng), torch.randn(163840, 2, generator=rng)
        targets = torch.randint(163840, (16384,), generator=rng)
        blocks = ((first, weight[first : first + 16384]) for first in range(0, 163840, 16384))
        nll = negative_log_likelihood(hidden, targets, blocks)
        last = torch.nn.functional.cross_entropy(hidden[-8:] @ weight.T, targets[-8:])
        assert abs(float(nll[-8:].mean()) - float(last)) < 1e-4
        print(len(nll), int(torch.isfinite(nll).sum()))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    scored, finite, peak = map(int, run.stdout.split())
    assert scored == finite == 16384
    assert peak < 2 << 30
