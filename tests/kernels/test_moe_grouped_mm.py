from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch

from k3quant import ops
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3quant.kernels import moe_grouped_mm as moe_module
from k3quant.kernels.moe_grouped_mm import (
    PackedExperts,
    PackedWeight,
    moe_grouped_mm,
    pack_experts,
)
from k3quant.models.moe import routed_experts
from k3quant.models.router import Routing
from k3quant.models.situ import situ

BOUNDS = {"beta": 4.0, "linear_beta": 25.0}
ROLES = ("expert.w1", "expert.w2", "expert.w3")

# The reference rounds gate, up, their product and each expert's output to bfloat16, which costs
# 4e-3 against float32. The kernels round at the same places after sums of another order.
BOUND = 2e-3
BOUND_TO_FLOAT32 = 6e-3


class Layer:
    """Small random experts, packed and decoded."""

    def __init__(self, experts: int, latent: int, inner: int) -> None:
        generator = torch.Generator().manual_seed(16)
        shapes = ((inner, latent), (latent, inner), (inner, latent))
        self.packed, self.decoded = [], []
        for rows, cols in shapes:
            weight = torch.randn((experts, rows, cols), generator=generator) * cols**-0.5
            pair = quantize_mxfp4(weight, ScaleRounding.EVEN)
            self.packed.append(PackedWeight(*pair))
            self.decoded.append(dequantize_mxfp4(*pair))

    def on(self, device: str) -> PackedExperts:
        w1, w2, w3 = self.packed
        pairs = zip((w1.packed, w1.scale_e8m0), (w3.packed, w3.scale_e8m0), strict=True)
        w13 = PackedWeight(*(torch.cat(pair, dim=1).to(device) for pair in pairs))
        return pack_experts(w13, PackedWeight(w2.packed.to(device), w2.scale_e8m0.to(device)))

    def reference(self, z: torch.Tensor, routing: Routing) -> torch.Tensor:
        def weights(experts: Sequence[int]) -> Iterable[Mapping[str, torch.Tensor]]:
            for expert in experts:
                yield {
                    role: weight[expert].to(z.dtype)
                    for role, weight in zip(ROLES, self.decoded, strict=True)
                }

        return routed_experts(z, routing, weights, gate=lambda g, u: situ(g, u, **BOUNDS))


def routing_of(tokens: int, k: int, experts: int) -> Routing:
    """Distinct experts a token; the last expert gets nothing, the first most tokens."""
    generator = torch.Generator().manual_seed(17)
    preference = torch.rand((tokens, experts), generator=generator)
    preference[:, 0] += 0.5
    preference[:, -1] = -1
    idx = preference.topk(k, dim=-1).indices.sort(dim=-1).values
    return Routing(idx, torch.rand((tokens, k), generator=generator))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
@pytest.mark.parametrize("tokens", [0, 1, 9, 40], ids=str)
def test_close_to_the_reference(
    device: str, error_ratio: Callable[..., float], fused: bool, tokens: int
) -> None:
    experts, latent, inner, k = 5, 384, 256, 3
    layer = Layer(experts, latent, inner)
    routing = routing_of(tokens, k, experts)
    z = torch.randn((tokens, latent), generator=torch.Generator().manual_seed(18)).bfloat16()
    out = moe_grouped_mm(
        z.to(device),
        routing.topk_idx.to(device),
        routing.topk_weight.to(device),
        layer.on(device),
        **BOUNDS,
        fused=fused,
        chunk_bytes=2 * 3 * latent * inner * 2,  # two of five experts
    )
    assert out.shape == z.shape
    if tokens:
        assert error_ratio(out, layer.reference(z, routing)) < BOUND
        assert error_ratio(out, layer.reference(z.float(), routing)) < BOUND_TO_FLOAT32


def test_ops_takes_a_routing(device: str, same_bits: Callable[..., bool]) -> None:
    layer, routing = Layer(4, 128, 128), routing_of(20, 2, 4)
    z = torch.randn((20, 128), generator=torch.Generator().manual_seed(20)).bfloat16().to(device)
    there = Routing(routing.topk_idx.to(device), routing.topk_weight.to(device))
    got = ops.routed_experts(z, there, layer.on(device), **BOUNDS)
    direct = (there.topk_idx, there.topk_weight, layer.on(device))
    assert same_bits(got, moe_grouped_mm(z, *direct, **BOUNDS, fused=True))


def test_odd_widths_are_decoded_first(device: str, error_ratio: Callable[..., float]) -> None:
    layer, routing = Layer(4, 96, 160), routing_of(20, 2, 4)
    z = torch.randn((20, 96), generator=torch.Generator().manual_seed(19)).bfloat16()
    experts = layer.on(device)
    assert not experts.fits_fused
    where = (z.to(device), routing.topk_idx.to(device), routing.topk_weight.to(device))
    assert (
        error_ratio(moe_grouped_mm(*where, experts, **BOUNDS), layer.reference(z, routing)) < BOUND
    )
    with pytest.raises(ValueError, match="columns in multiples of 128 and scale bytes up to 128"):
        moe_grouped_mm(*where, experts, **BOUNDS, fused=True)


@pytest.mark.parametrize("byte", [0, 128], ids=["smallest", "largest"])
def test_fused_decodes_every_code_under_extreme_scales(device: str, byte: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(32).reshape(1, 128, 64)
    scale = torch.full((1, 128, 4), byte, dtype=torch.uint8)
    w2 = PackedWeight(packed.to(device), scale.to(device))
    # Gate and up are identities, so SiTU of the token meets w2.
    eye = quantize_mxfp4(torch.eye(128).repeat(2, 1)[None], ScaleRounding.FLOOR)
    experts = pack_experts(PackedWeight(*(x.to(device) for x in eye)), w2)
    z = torch.full((1, 128), 0.75, dtype=torch.bfloat16, device=device)
    one = torch.zeros((1, 1), dtype=torch.int64, device=device)
    share = torch.ones((1, 1), device=device)
    out = moe_grouped_mm(z, one, share, experts, **BOUNDS, fused=True)
    hidden = situ(z.cpu(), z.cpu(), **BOUNDS)
    weight = dequantize_mxfp4(packed, scale, dtype=torch.float32)[0]
    expected = hidden.float() @ weight.T
    assert torch.allclose(out.cpu().float(), expected, rtol=2**-7, atol=0)


def test_many_rows_go_through_one_product_after_the_other(
    device: str, same_bits: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, routing = Layer(4, 96, 160), routing_of(20, 2, 4)
    z = torch.randn((20, 96), generator=torch.Generator().manual_seed(19)).bfloat16()
    where = (z.to(device), routing.topk_idx.to(device), routing.topk_weight.to(device))
    monkeypatch.setattr(moe_module, "_ALONE_ROWS", 1)
    monkeypatch.setattr(moe_module, "moe_tiles_mm", None)
    out = moe_grouped_mm(*where, layer.on(device), **BOUNDS, fused=False)
    # The products are torch's on either side, and so is the order of the sum.
    expected = layer.reference(z.to(device).cpu(), routing)
    assert torch.allclose(out.cpu().float(), expected.float(), rtol=2**-6, atol=1e-3)
    again = moe_grouped_mm(*where, layer.on(device), **BOUNDS, fused=False)
    assert same_bits(out, again)


def test_other_dtypes_are_refused(device: str) -> None:
    experts = Layer(2, 128, 128).on(device)
    idx = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"z: expected bfloat16, got torch\.float32"):
        moe_grouped_mm(
            torch.zeros((1, 128), device=device),
            idx,
            torch.ones((1, 1), device=device),
            experts,
            **BOUNDS,
        )
