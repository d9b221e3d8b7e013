"""Routed experts a chunk at a time, as their weights arrive on the device.

Slots, one for each token and chosen expert, are sorted by expert once a layer; a chunk computes its
experts' slots and adds them to each token's float32 sum in a fixed order, so that numbers depend on
the chunks' size in the last bit at most, and never on timing.

Legend: N tokens, L width of the experts' space, k experts a token.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from k3quant import ops
from k3quant.errors import ValuesError
from k3quant.eval.stored import place_name
from k3quant.eval.weight_walk import parts_of
from k3quant.eval.weights import decode_weights
from k3quant.formats.mx import E8M0_NAN
from k3quant.kernels.expert_tiles import SortedSlots, sort_slots
from k3quant.models.mlp import gated_mlp
from k3quant.models.router import Routing
from k3quant.models.situ import Gate
from k3quant.stream.reader import Loaded

MAX_ROWS = 1 << 17
"""Slots whose inner activations exist at a time; one expert's are never split."""

DECODED_BYTES = 1 << 30


def routed_experts(
    z: Tensor,
    routing: Routing,
    chunks: Iterable[Loaded],
    release: Callable[[Loaded], None],
    *,
    num_experts: int,
    gate: Gate,
    betas: tuple[float, float] | None,
) -> Tensor:
    """Sum the chosen experts' outputs, weighted, in float32; reference: `models.moe`.

    Args:
        z: `[N, L]`.
        routing: Experts and weights of each token.
        chunks: The layer's experts that were loaded, ascending.
        release: Called with each chunk when it is no longer needed.
        num_experts: Experts of the layer.
        gate: SiTU or SiLU.
        betas: Bounds of SiTU, which the kernels compute; None where the gate is another.

    Returns:
        `[N, L]` in the dtype of `z`.

    Raises:
        ValuesError: A scale byte is NaN, or a weight overflows.
    """
    k = routing.topk_idx.shape[-1]
    order = sort_slots(routing.topk_idx, num_experts)
    edges = order.offsets.tolist()
    token = order.slot // k
    total = torch.zeros_like(z, dtype=torch.float32)
    weight = routing.topk_weight.contiguous()
    for loaded in chunks:
        for first, last in _groups(loaded.chunk.experts, edges):
            start, end = (
                edges[loaded.chunk.experts[first]],
                edges[loaded.chunk.experts[last - 1] + 1],
            )
            if start == end:
                continue
            if betas is not None and _takes_kernels(loaded, z):
                counts = [edges[e + 1] - edges[e] for e in loaded.chunk.experts[first:last]]
                out = _from_packed(z, order.slot[start:end], k, loaded, first, last, counts, betas)
            else:
                out = _one_by_one(z, token[start:end], loaded, first, last, edges, gate)
            ops.add_outputs(out, order.place, weight, total, start)
        release(loaded)
    return total.to(z.dtype)


def _groups(experts: tuple[int, ...], edges: list[int]) -> Iterator[tuple[int, int]]:
    """Cut a chunk's experts into runs of a bounded number of slots."""
    first = 0
    for at in range(len(experts)):
        if at > first and edges[experts[at] + 1] - edges[experts[first]] > MAX_ROWS:
            yield first, at
            first = at
    yield first, len(experts)


def _takes_kernels(loaded: Loaded, z: Tensor) -> bool:
    parts = {part for _, part in loaded.chunk.stacks}
    return (
        z.is_cuda
        and z.dtype is torch.bfloat16
        and parts == {"weight_packed", "weight_scale"}
        and _is_mxfp4(loaded)
    )


def _is_mxfp4(loaded: Loaded) -> bool:
    return all(
        shape[-1] * 16 == loaded.chunk.stacks[role, "weight_packed"][0][-1]
        for (role, part), (shape, _) in loaded.chunk.stacks.items()
        if part == "weight_scale"
    )


def _from_packed(
    z: Tensor,
    slot: Tensor,
    k: int,
    loaded: Loaded,
    first: int,
    last: int,
    counts: list[int],
    betas: tuple[float, float],
) -> Tensor:
    """Multiply MXFP4 weights as they lie in the arena."""
    from k3quant.kernels.moe_grouped_mm import PackedWeight, pack_experts

    def stack(role: str, part: str) -> Tensor:
        shape, start = loaded.chunk.stacks[role, part]
        return loaded.view(start, prod(shape), torch.uint8, shape)[first:last]

    w13 = PackedWeight(stack("expert.w1", "weight_packed"), stack("expert.w1", "weight_scale"))
    w2 = PackedWeight(stack("expert.w2", "weight_packed"), stack("expert.w2", "weight_scale"))
    experts = pack_experts(w13, w2)
    if experts.largest_scale == E8M0_NAN:
        raise _nan_scale(loaded, first, w13.scale_e8m0, w2.scale_e8m0)
    offsets = torch.tensor([0, *counts], device=z.device).cumsum(0).int()
    # Only the width of `place` counts here: slots a token.
    order = SortedSlots(slot, slot.new_empty((0, k)), offsets)
    beta, linear_beta = betas
    return ops.expert_outputs(
        z, order, experts, beta=beta, linear_beta=linear_beta, chunk_bytes=DECODED_BYTES
    )


def _one_by_one(
    z: Tensor,
    token: Tensor,
    loaded: Loaded,
    first: int,
    last: int,
    edges: list[int],
    gate: Gate,
) -> Tensor:
    """Decode an expert after the other; any storage form, any dtype."""
    out = z.new_empty((len(token), z.shape[1]))
    experts = loaded.chunk.experts[first:last]
    for expert in experts:
        mine = slice(edges[expert] - edges[experts[0]], edges[expert + 1] - edges[experts[0]])
        if mine.start == mine.stop:
            continue
        w = decode_weights(
            parts_of(loaded, expert), dtype=z.dtype, where=place_name(loaded.chunk.layer, expert)
        )
        out[mine] = gated_mlp(
            z[token[mine]], w["expert.w1"], w["expert.w3"], w["expert.w2"], gate=gate
        )
    return out


def _nan_scale(loaded: Loaded, first: int, *scales: Tensor) -> ValuesError:
    for scale in scales:
        bad = (scale == E8M0_NAN).flatten(1).any(dim=1).nonzero().flatten()
        if len(bad):
            expert = loaded.chunk.experts[first + int(bad[0])]
            return ValuesError(
                f"{place_name(loaded.chunk.layer, expert)}: expected finite scales, got NaN "
                "(scale byte 255)",
                hint="`k3quant verify --level values` names every tensor",
            )
    raise AssertionError("no NaN scale")
