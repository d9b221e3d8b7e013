from collections.abc import Callable

import pytest
import torch

from k3quant.kernels.router_topk import router_topk


def reference(
    logits: torch.Tensor, bias: torch.Tensor, k: int, *, sigmoid: bool, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    idx = torch.topk(scores + bias, k, dim=-1).indices.sort(dim=-1).values
    weight = scores.gather(-1, idx)
    if renormalize:
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
    return idx, weight * 2.5


@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "as-they-are"])
@pytest.mark.parametrize(("experts", "k"), [(90, 7), (16, 16), (5, 1)], ids=["odd", "all", "one"])
def test_choice_and_weights(
    device: str,
    error_ratio: Callable[..., float],
    sigmoid: bool,
    renormalize: bool,
    experts: int,
    k: int,
) -> None:
    generator = torch.Generator().manual_seed(15)
    logits = 2 * torch.randn((6, experts), generator=generator)
    bias = torch.randn(experts, generator=generator) / 10
    idx, weight = router_topk(
        logits.to(device),
        bias.to(device),
        k=k,
        sigmoid=sigmoid,
        renormalize=renormalize,
        scaling=2.5,
        sum_eps=1e-20,
    )
    settings = {"sigmoid": sigmoid, "renormalize": renormalize}
    expected_idx, expected_weight = reference(logits, bias, k, **settings)
    assert torch.equal(idx.cpu(), expected_idx)
    assert error_ratio(weight, expected_weight) < 1e-6


def test_of_equal_choices_the_lower_experts_win(device: str) -> None:
    logits = torch.zeros(2, 40, device=device)
    idx, weight = router_topk(
        logits,
        logits[0],
        k=3,
        sigmoid=True,
        renormalize=True,
        scaling=1.0,
        sum_eps=1e-20,
    )
    assert idx.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weight.cpu(), torch.tensor(1 / 3))


def test_nan_counts_as_largest(device: str) -> None:
    logits = torch.zeros(1, 40, device=device)
    logits[0, 30] = float("nan")
    idx, _ = router_topk(
        logits,
        torch.zeros(40, device=device),
        k=2,
        sigmoid=True,
        renormalize=True,
        scaling=1.0,
        sum_eps=1e-20,
    )
    assert idx.tolist() == [[0, 30]]
