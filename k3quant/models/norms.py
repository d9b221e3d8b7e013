"""Root-mean-square norms, computed in float32 whatever the activations are."""

import torch
from torch import Tensor

LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says
L2_NORM_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Divide by the root of the mean square, round to the activation dtype, then weigh.

    Args:
        x: `[..., D]` activations.
        weight: `[D]`.
        eps: Added to the mean square.

    Returns:
        `[..., D]` in the dtype of `x`; zeros stay zero.

    Source: Kimi-K3 modelling code, KimiRMSNorm.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Norm, weigh and multiply by sigmoid(gate), rounding once.

    Args:
        x: `[..., D]` float32.
        weight: `[D]`.
        gate: `[..., D]` before the sigmoid; its dtype is the result's.
        eps: Added to the mean square.

    Returns:
        `[..., D]` in the dtype of `gate`.

    Source: fla, FusedRMSNormGated with a sigmoid gate.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float() * torch.sigmoid(gate.float())).to(gate.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """Divide by the length; the epsilon is added to the sum of squares.

    Args:
        x: `[..., D]`.

    Returns:
        `[..., D]` float32; zeros stay zero.

    Source: fla, l2norm.
    """
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().sum(dim=-1, keepdim=True) + L2_NORM_EPS)
