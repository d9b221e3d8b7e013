"""Random inputs of K3's shapes for the kernel benchmarks."""

import torch
from torch import Tensor

from k3quant.kernels.moe_grouped_mm import PackedExperts, PackedWeight, pack_experts

INNER, LATENT = 3072, 3584
SHAPES = ((INNER, LATENT), (LATENT, INNER))
TOP_K = 16
BOUNDS = {"beta": 4.0, "linear_beta": 25.0}


def random_bf16(*shape: int) -> Tensor:
    """Return normal random bfloat16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def random_mxfp4(count: int, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return random codes under scales spread as the release's are, on the GPU."""
    packed = torch.randint(0, 256, (count, rows, cols // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(114, 121, (count, rows, cols // 32), dtype=torch.uint8, device="cuda")
    return packed, scales


def random_experts(count: int) -> PackedExperts:
    """Return a layer's experts, all three projections."""
    w13 = PackedWeight(*random_mxfp4(count, 2 * INNER, LATENT))
    return pack_experts(w13, PackedWeight(*random_mxfp4(count, LATENT, INNER)))


def random_routing(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return distinct experts for each token, ascending, and weights that sum to one."""
    k = min(TOP_K, experts)
    pieces = [
        torch.rand((min(16384, tokens - first), experts), device="cuda").topk(k, dim=-1).indices
        for first in range(0, tokens, 16384)
    ]
    idx = torch.cat(pieces).sort(dim=-1).values
    share = torch.rand((tokens, k), device="cuda")
    return idx, share / share.sum(dim=-1, keepdim=True)


def moe_flops(idx: Tensor) -> int:
    """Return the floating-point operations of three products for each slot."""
    return 2 * 3 * INNER * LATENT * idx.numel()


def moe_weight_bytes(experts: PackedExperts) -> int:
    """Return the bytes of all packed codes and scales."""
    weights = (experts.w13, experts.w2)
    return sum(w.packed.numel() + w.scale_e8m0.numel() for w in weights)


def kda_inputs(windows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values, log decays and betas of 96 heads of 128 channels."""
    shape = (windows, tokens, 96, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = -5 * torch.rand(shape, device="cuda")
    beta = torch.rand(shape[:3], device="cuda")
    return q * 128**-0.5, k, v, log_decay, beta
