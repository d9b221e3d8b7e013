import pytest
import torch

from k3quant.models.situ import silu_gate, situ


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        pytest.param(1.0, 1.0, 0.7158178281, id="small-values-almost-linear"),
        pytest.param(100.0, 100.0, 99.9329299739, id="both-sides-bounded"),
        pytest.param(-100.0, 100.0, 0.0, id="closed-gate"),
    ],
)
def test_situ_has_the_published_values(gate, up, expected):
    out = situ(torch.tensor([gate]), torch.tensor([up]), beta=4.0, linear_beta=25.0)
    assert out.item() == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_situ_never_exceeds_the_product_of_its_bounds():
    values = torch.linspace(-1e4, 1e4, 41)
    gate, up = values[:, None], values[None, :]
    assert situ(gate, up, beta=4.0, linear_beta=25.0).abs().max() <= 100


def test_silu_gate_is_silu_times_up():
    out = silu_gate(torch.tensor([1.0]), torch.tensor([1.0]))
    assert out.item() == pytest.approx(0.7310585786, rel=1e-6)
