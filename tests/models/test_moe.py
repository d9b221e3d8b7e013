from dataclasses import replace

import pytest
import torch

from k3quant.models.k3_config import MoeConfig
from k3quant.models.moe import moe_block, routed_experts
from k3quant.models.router import Routing
from k3quant.models.situ import silu_gate, situ

D, L, INNER, E = 12, 8, 6, 5


class _Config:
    """What a mixture of experts reads of a config."""

    def __init__(self, moe, situ_betas=(4.0, 25.0)):
        self.moe = moe
        self.rms_norm_eps = 1e-5
        self.activation_situ_beta, self.activation_situ_linear_beta = situ_betas


MOE = MoeConfig(
    num_experts=E,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=INNER,
    routed_expert_hidden_size=L,
    latent_moe_use_norm=True,
    moe_router_activation_func="sigmoid",
    num_expert_group=1,
    topk_group=1,
    moe_renormalize=True,
    routed_scaling_factor=1.5,
)


def _weights(width, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "moe.gate": (E, D),
        "moe.bias": (E,),
        "moe.latent_down": (L, D),
        "moe.latent_up": (D, L),
        "moe.latent_norm": (L,),
        "moe.shared.gate_proj": (2 * INNER, D),
        "moe.shared.up_proj": (2 * INNER, D),
        "moe.shared.down_proj": (D, 2 * INNER),
    }
    weights = {n: 0.5 * torch.randn(s, generator=rng) for n, s in shapes.items()}
    experts = [
        {
            "expert.w1": torch.randn(INNER, width, generator=rng),
            "expert.w2": torch.randn(width, INNER, generator=rng),
            "expert.w3": torch.randn(INNER, width, generator=rng),
        }
        for _ in range(E)
    ]
    return weights, experts


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="latent-with-norm"),
        pytest.param({"latent_moe_use_norm": False}, id="latent-without-norm"),
        pytest.param({"routed_expert_hidden_size": None}, id="no-latent"),
        pytest.param({"num_shared_experts": 0}, id="no-shared"),
        pytest.param({"num_experts_per_token": E}, id="every-expert"),
    ],
)
@pytest.mark.parametrize("betas", [(4.0, 25.0), (None, None)], ids=["situ", "silu"])
def test_block_equals_its_formula_token_by_token(changes, betas):
    moe = replace(MOE, **changes)
    latent = moe.routed_expert_hidden_size is not None
    w, experts = _weights(L if latent else D)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(1))
    out = moe_block(x, w, lambda wanted: (experts[e] for e in wanted), _Config(moe, betas))

    def gate(g, u):
        return silu_gate(g, u) if betas[0] is None else situ(g, u, beta=4.0, linear_beta=25.0)

    for t in range(9):
        scores = torch.sigmoid(w["moe.gate"] @ x[t])
        chosen = (scores + w["moe.bias"]).topk(moe.num_experts_per_token).indices
        weight = scores[chosen] / scores[chosen].sum() * 1.5
        z = w["moe.latent_down"] @ x[t] if latent else x[t]
        y = torch.zeros_like(z)
        for share, e in zip(weight, chosen.tolist(), strict=True):
            w1, w2, w3 = (experts[e][f"expert.w{i}"] for i in (1, 2, 3))
            y += share * (w2 @ gate(w1 @ z, w3 @ z))
        if latent and moe.latent_moe_use_norm:
            y = y / (y.square().mean() + 1e-5).sqrt() * w["moe.latent_norm"]
        y = w["moe.latent_up"] @ y if latent else y
        if moe.num_shared_experts:
            g, u, d = (w[f"moe.shared.{n}_proj"] for n in ("gate", "up", "down"))
            y = y + d @ gate(g @ x[t], u @ x[t])
        torch.testing.assert_close(out[t], y, rtol=1e-4, atol=1e-4)


def test_norm_is_taken_once_of_the_combined_latent():
    # Two experts give [3, 4] and [0, 0] with equal weights; SiLU of a large gate is the gate.
    moe = replace(
        MOE, num_experts=2, num_experts_per_token=2, num_shared_experts=0,
        routed_expert_hidden_size=2, routed_scaling_factor=1.0,
    )  # fmt: skip
    config = _Config(moe, (None, None))
    config.rms_norm_eps = 0.0
    first = {
        "expert.w1": torch.tensor([[100.0, 0.0]]),
        "expert.w3": torch.tensor([[0.01, 0.0]]),
        "expert.w2": torch.tensor([[3.0], [4.0]]),
    }
    second = first | {"expert.w2": torch.zeros(2, 1)}
    weights = {
        "moe.gate": torch.zeros(2, 2),
        "moe.bias": torch.zeros(2),
        "moe.latent_down": torch.eye(2),
        "moe.latent_up": torch.eye(2),
        "moe.latent_norm": torch.ones(2),
    }
    out = moe_block(torch.tensor([[1.0, 0.0]]), weights, lambda _: (first, second), config)
    torch.testing.assert_close(out, torch.tensor([[0.8485281374, 1.1313708499]]))


def test_only_chosen_experts_are_asked_for_in_order():
    _, experts = _weights(L)
    routing = Routing(torch.tensor([[1, 4], [1, 3]]), torch.full((2, 2), 0.5))
    asked = []

    def give(wanted):
        asked.append(list(wanted))
        return (experts[e] for e in wanted)

    routed_experts(torch.randn(2, L), routing, give, gate=silu_gate)
    assert asked == [[1, 3, 4]]


def test_an_expert_that_is_not_given_is_an_error():
    _, experts = _weights(L)
    routing = Routing(torch.tensor([[1, 4]]), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError):
        routed_experts(torch.randn(1, L), routing, lambda _: experts[:1], gate=silu_gate)
