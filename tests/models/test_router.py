import pytest
import torch

from k3quant.models.k3_config import MoeConfig
from k3quant.models.router import route


def _config(**changes):
    facts = {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 0,
        "moe_intermediate_size": 4,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
    }
    return MoeConfig(**(facts | changes))


def _route(scores, bias, moe, tap=None):
    """Route one token whose logits are given, through an identity gate."""
    scores = torch.tensor(scores)
    logits = torch.logit(scores) if moe.moe_router_activation_func == "sigmoid" else scores.log()
    return route(logits[None], torch.eye(len(scores)), torch.tensor(bias), moe, tap=tap)


def test_bias_selects_and_does_not_weigh():
    got = _route([0.6, 0.5, 0.4], [0.0, 0.0, 0.3], _config(num_experts=3))
    assert got.topk_idx.tolist() == [[0, 2]]
    torch.testing.assert_close(got.topk_weight, torch.tensor([[0.6, 0.4]]))


def test_scaling_comes_after_renormalisation():
    got = _route([0.6, 0.5, 0.2], [0.0] * 3, _config(num_experts=3, routed_scaling_factor=2.5))
    torch.testing.assert_close(got.topk_weight, torch.tensor([[0.6, 0.5]]) * 2.5 / 1.1)


@pytest.mark.parametrize(
    "changes", [{"moe_renormalize": False}, {"num_experts_per_token": 1}], ids=["off", "one-expert"]
)
def test_weights_without_renormalisation_are_the_scores(changes):
    got = _route([0.2, 0.6, 0.5], [0.0] * 3, _config(num_experts=3, **changes))
    assert got.topk_weight[0, 0].item() == pytest.approx(0.6, rel=1e-6)


def test_softmax_scores_sum_to_one_over_all_experts():
    moe = _config(num_experts=4, moe_router_activation_func="softmax", moe_renormalize=False)
    got = _route([0.1, 0.2, 0.3, 0.4], [0.0] * 4, moe)
    torch.testing.assert_close(got.topk_weight, torch.tensor([[0.3, 0.4]]))


def test_a_group_scores_by_its_two_best_and_the_others_are_out():
    moe = _config(num_expert_group=2, topk_group=1)
    # The best expert of all is alone in its group; the other group's two best sum higher.
    got = _route([0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.5, 0.1], [0.0] * 8, moe)
    assert got.topk_idx.tolist() == [[4, 5]]


def test_bias_takes_part_in_the_choice_of_groups():
    moe = _config(num_expert_group=2, topk_group=1)
    scores = [0.9, 0.3, 0.1, 0.1, 0.6, 0.5, 0.1, 0.1]
    assert _route(scores, [0.0] * 8, moe).topk_idx.tolist() == [[0, 1]]
    got = _route(scores, [0.0] * 4 + [0.2] * 4, moe)
    assert got.topk_idx.tolist() == [[4, 5]]
    torch.testing.assert_close(got.topk_weight, torch.tensor([[0.6, 0.5]]) / 1.1)


@pytest.mark.parametrize(
    ("groups", "kept", "expected"),
    [
        pytest.param(1, 1, 0.1, id="between-experts"),
        pytest.param(2, 1, 0.05, id="between-groups"),
        pytest.param(2, 2, 0.1, id="all-groups-kept"),
    ],
)
def test_margin_is_the_smallest_gap_to_a_rejected_one(groups, kept, expected):
    seen = {}
    moe = _config(num_experts=4, num_expert_group=groups, topk_group=kept)
    _route([0.6, 0.45, 0.5, 0.6], [0.0] * 4, moe, tap=seen.__setitem__)
    # Groups score 1.05 and 1.1; inside the better one nothing is left to reject.
    assert seen["router_margin"].item() == pytest.approx(expected, rel=1e-4)


def test_margin_is_infinite_where_every_expert_is_chosen():
    seen = {}
    _route([0.6, 0.4], [0.0] * 2, _config(num_experts=2), tap=seen.__setitem__)
    assert seen["router_margin"].item() == float("inf")


def test_routing_is_float32_whatever_the_activations_are():
    moe = _config(num_experts=2, num_experts_per_token=1)
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    # The logits differ by less than a bfloat16 step.
    gate = torch.tensor([[1.0, 0.0], [1.0, 0.001]])
    assert route(x, gate, torch.zeros(2), moe).topk_idx.item() == 1
