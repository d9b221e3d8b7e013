"""The gates of the MLPs: SiTU, K3's bounded cousin of SwiGLU, and plain SiLU."""

from collections.abc import Callable

import torch
from torch import Tensor

from k3quant.models.k3_config import K3Config

Gate = Callable[[Tensor, Tensor], Tensor]
"""Takes the gate and up projections, returns what the down projection reads."""


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Compute beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    Args:
        gate: `[..., N]`.
        up: `[..., N]`.
        beta: Bound of the gate's side.
        linear_beta: Bound of the linear side.

    Returns:
        `[..., N]` in the dtype of `gate`, computed in float32; at most beta * linear_beta.

    Source: Kimi-K3 modelling code, SiTU.
    """
    gate32, up32 = gate.float(), up.float()
    bounded = beta * torch.tanh(gate32 / beta) * torch.sigmoid(gate32)
    return (bounded * (linear_beta * torch.tanh(up32 / linear_beta))).to(gate.dtype)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up in float32, `[..., N]` each, rounding once."""
    gate32 = gate.float()
    return (gate32 * torch.sigmoid(gate32) * up.float()).to(gate.dtype)


def gate_of(config: K3Config) -> Gate:
    """Return the gate that a config's `hidden_act` names."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    if beta is None or linear_beta is None:
        return silu_gate
    return lambda gate, up: situ(gate, up, beta=beta, linear_beta=linear_beta)
