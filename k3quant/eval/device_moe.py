"""Routed experts a chunk at a time, as their weights arrive on the device.

Slots, one for each token and chosen expert, are sorted by expert once a layer; a chunk computes its
experts' slots and adds them to each token's float32 sum in a fixed order, so that numbers depend on
the chunks' size in the last bit at most, and never on timing.

Legend: N tokens, L width of the experts' space, k experts a token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from k3quant.errors import ValuesError
from k3quant.eval.weights import StoredPart, decode_weight
from k3quant.formats.mx import E8M0_NAN
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
    by_expert, slot = torch.sort(routing.topk_idx.flatten(), stable=True)
    place = torch.empty_like(slot)
    place[slot] = torch.arange(len(slot), device=slot.device)
    place = place.view(routing.topk_idx.shape)
    edge = torch.arange(num_experts + 1, device=slot.device)
    edges = torch.searchsorted(by_expert, edge).tolist()
    token = slot // k
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
                out = _from_packed(z, slot[start:end], k, loaded, first, last, counts, betas)
            else:
                out = _one_by_one(z, token[start:end], loaded, first, last, edges, gate)
            _add(out, place, weight, total, start)
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
    from k3quant.kernels.expert_tiles import SortedSlots
    from k3quant.kernels.moe_grouped_mm import PackedExperts, PackedWeight, expert_outputs

    def stack(role: str, part: str) -> Tensor:
        shape, start = loaded.chunk.stacks[role, part]
        length = 1
        for size in shape:
            length *= size
        return loaded.view(start, length, torch.uint8, shape)[first:last]

    w13 = PackedWeight(stack("expert.w1", "weight_packed"), stack("expert.w1", "weight_scale"))
    w2 = PackedWeight(stack("expert.w2", "weight_packed"), stack("expert.w2", "weight_scale"))
    largest = int(torch.stack([w.scale_e8m0.max() for w in (w13, w2)]).max())
    if largest == E8M0_NAN:
        raise _nan_scale(loaded, first, w13.scale_e8m0, w2.scale_e8m0)
    offsets = torch.tensor([0, *counts], device=z.device).cumsum(0).int()
    # Only the width of `place` counts here: slots a token.
    order = SortedSlots(slot, slot.new_empty((0, k)), offsets)
    return expert_outputs(
        z,
        order,
        PackedExperts(w13=w13, w2=w2, largest_scale=largest),
        beta=betas[0],
        linear_beta=betas[1],
        chunk_bytes=DECODED_BYTES,
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
        try:
            w = {
                role: decode_weight(parts, dtype=z.dtype)
                for role, parts in parts_of(loaded, expert)
            }
        except ValuesError as error:
            where = f"layer {loaded.chunk.layer}, expert {expert}"
            raise ValuesError(f"{where}: {error.message}", hint=error.hint) from error
        out[mine] = gated_mlp(
            z[token[mine]], w["expert.w1"], w["expert.w3"], w["expert.w2"], gate=gate
        )
    return out


def parts_of(loaded: Loaded, expert: int | None) -> Iterator[tuple[str, Mapping[str, StoredPart]]]:
    """Yield the stored parts of an expert, or of the layer's own tensors, by role."""
    roles: dict[str, dict[str, StoredPart]] = {}
    for (role, part), place in loaded.chunk.places[expert].items():
        data = loaded.data[place.start : place.start + place.length]
        roles.setdefault(role, {})[part] = StoredPart(place.name, place.dtype, place.shape, data)
    yield from roles.items()


def _add(out: Tensor, place: Tensor, weight: Tensor, total: Tensor, start: int) -> None:
    if out.is_cuda:
        from k3quant.kernels.moe_accumulate import moe_accumulate

        moe_accumulate(out, place, weight, total, start)
        return
    for j in range(place.shape[1]):
        row = place[:, j] - start
        mine = ((row >= 0) & (row < len(out))).nonzero()[:, 0]
        total[mine] += out[row[mine]].float() * weight[mine, j, None]


def _nan_scale(loaded: Loaded, first: int, *scales: Tensor) -> ValuesError:
    for scale in scales:
        bad = (scale == E8M0_NAN).flatten(1).any(dim=1).nonzero().flatten()
        if len(bad):
            expert = loaded.chunk.experts[first + int(bad[0])]
            return ValuesError(
                f"layer {loaded.chunk.layer}, expert {expert}: expected finite scales, got NaN "
                "(scale byte 255)",
                hint="`k3quant verify --level values` names every tensor",
            )
    raise AssertionError("no NaN scale")
