"""The routed experts of a layer from MXFP4 on the GPU; reference: models.moe.routed_experts.

Few tokens an expert: weights are decoded inside the product and cross memory once. Many: a chunk
of experts at a time is decoded to bfloat16 first, which then costs little beside the products.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from k3quant.kernels.expert_tiles import SortedSlots, cut_tiles, sort_slots
from k3quant.kernels.moe_combine import moe_combine
from k3quant.kernels.moe_tiles_mm import TILE_ROWS, moe_tiles_mm
from k3quant.kernels.moe_w4a16 import (
    DEPTH,
    MAX_SCALE,
    down,
    gate_up,
    interleave_columns,
    slots_of_tile,
)
from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4
from k3quant.kernels.situ_and_mul import situ_and_mul

FUSED_TOKENS = 896
"""Tokens an expert up to which the fused form is faster, measured on one H200."""

CHUNK_BYTES = 4 << 30

# Rows an expert from which one product after the other beats all in one launch, likewise.
_ALONE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One projection of all experts.

    Attributes:
        packed: `[E, out, in / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[E, out, in / 32]` uint8, contiguous, none 255.
    """

    packed: Tensor
    scale_e8m0: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The routed experts of a layer.

    Attributes:
        w13: Gate projections and, behind each expert's, up projections, `[E, 2 inner, latent]`.
        w2: Down projections, `[E, latent, inner]`.
        largest_scale: The largest scale byte of all; the fused form takes up to 128.
    """

    w13: PackedWeight
    w2: PackedWeight
    largest_scale: int

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.w2.packed.shape[0]

    @property
    def fits_fused(self) -> bool:
        """Whether shapes and scales allow the fused form."""
        inner, latent = self.w2.packed.shape[2] * 2, self.w2.packed.shape[1]
        return not (inner % DEPTH or latent % DEPTH) and self.largest_scale <= MAX_SCALE


def pack_experts(w13: PackedWeight, w2: PackedWeight) -> PackedExperts:
    """Put a layer's experts together, looking at their scales once."""
    largest = int(torch.stack([weight.scale_e8m0.max() for weight in (w13, w2)]).max())
    return PackedExperts(w13=w13, w2=w2, largest_scale=largest)


def moe_grouped_mm(
    z: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: PackedExperts,
    *,
    beta: float,
    linear_beta: float,
    fused: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Sum the chosen experts' outputs, weighted, in float32.

    Args:
        z: `[N, latent]` bfloat16, contiguous.
        topk_idx: `[N, k]` expert of each slot.
        topk_weight: `[N, k]` float32.
        experts: The experts.
        beta: Bound of SiTU's gate side.
        linear_beta: Bound of its linear side.
        fused: Which form to take; None decides by tokens an expert.
        chunk_bytes: Upper bound of decoded weights alive at once; one expert is always allowed.

    Returns:
        `[N, latent]` bfloat16, the same bits every time.

    Raises:
        ValueError: `z` is not bfloat16, or `fused` is asked for where it does not fit.

    Source: Kimi-K3 modelling code, KimiSparseMoeBlock.
    """
    order = sort_slots(topk_idx, experts.count)
    out = expert_outputs(
        z,
        order,
        experts,
        beta=beta,
        linear_beta=linear_beta,
        fused=fused,
        chunk_bytes=chunk_bytes,
    )
    return moe_combine(out, order.place, topk_weight)


def expert_outputs(
    z: Tensor,
    order: SortedSlots,
    experts: PackedExperts,
    *,
    beta: float,
    linear_beta: float,
    fused: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the output of each sorted slot, `[slots, latent]` bfloat16; as `moe_grouped_mm`.

    The slots may be a part of all, those of some experts: only `order.slot` and `order.offsets`
    say which, and `order.place` how many slots a token has.
    """
    if z.dtype != torch.bfloat16:
        raise ValueError(f"z: expected bfloat16, got {z.dtype}")
    slots = len(order.slot)
    if fused is None:
        fused = experts.fits_fused and slots <= FUSED_TOKENS * experts.count
    if fused and not experts.fits_fused:
        raise ValueError(
            f"experts: expected columns in multiples of {DEPTH} and scale bytes up to {MAX_SCALE}"
        )
    if fused:
        return _fused(z, order, experts, beta=beta, linear_beta=linear_beta)
    return _decoded(z, order, experts, chunk_bytes, beta=beta, linear_beta=linear_beta)


def _fused(
    z: Tensor, order: SortedSlots, experts: PackedExperts, *, beta: float, linear_beta: float
) -> Tensor:
    slots = len(order.slot)
    rows = slots_of_tile(slots / experts.count)
    x = interleave_columns(z)
    tiles = cut_tiles(order.offsets, slots, rows)
    w13, w2 = ((w.packed, w.scale_e8m0) for w in (experts.w13, experts.w2))
    hidden = gate_up(x, w13, order, tiles, rows=rows, beta=beta, linear_beta=linear_beta)
    return down(hidden, w2, order, tiles, rows=rows)


def _decoded(
    z: Tensor,
    order: SortedSlots,
    experts: PackedExperts,
    chunk_bytes: int,
    *,
    beta: float,
    linear_beta: float,
) -> Tensor:
    k, latent = order.place.shape[1], z.shape[1]
    inner = experts.w2.packed.shape[2] * 2
    step = max(1, min(experts.count, chunk_bytes // (3 * inner * latent * z.itemsize)))
    up_buffer = z.new_empty((step, 2 * inner, latent))
    down_buffer = z.new_empty((step, latent, inner))
    out = z.new_empty((len(order.slot), latent))
    edges = order.offsets.tolist()
    for first in range(0, experts.count, step):
        last = min(first + step, experts.count)
        rows = slice(edges[first], edges[last])
        if rows.start == rows.stop:
            continue
        up_weight, down_weight = up_buffer[: last - first], down_buffer[: last - first]
        for weight, target in ((experts.w13, up_weight), (experts.w2, down_weight)):
            packed, scale_e8m0 = weight.packed[first:last], weight.scale_e8m0[first:last]
            dequantize_mxfp4(packed, scale_e8m0, out=target)
        starts = [edge - rows.start for edge in edges[first : last + 1]]
        both = _products(z[order.slot[rows] // k], up_weight, starts)
        hidden = situ_and_mul(both[:, :inner], both[:, inner:], beta=beta, linear_beta=linear_beta)
        out[rows] = _products(hidden, down_weight, starts)
    return out


def _products(x: Tensor, weight: Tensor, starts: list[int]) -> Tensor:
    """Multiply each expert's rows `[rows, in]` by its weight `[E, out, in]`, `[rows, out]`.

    Many rows fill the device with one expert's product, and the vendor's is faster then.
    """
    if len(x) >= _ALONE_ROWS * len(weight):
        out = x.new_empty((len(x), weight.shape[1]))
        for expert, (first, last) in enumerate(pairwise(starts)):
            torch.mm(x[first:last], weight[expert].T, out=out[first:last])
        return out
    offsets = torch.tensor(starts, dtype=torch.int32, device=x.device)
    return moe_tiles_mm(x, weight, cut_tiles(offsets, len(x), TILE_ROWS), offsets)
