"""Which rows of which expert a program computes; reference: models.moe.routed_experts' slices.

Slots, one for each token and chosen expert, are sorted by expert; an expert's slots are cut into
tiles of equal size, the last one short.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SortedSlots(NamedTuple):
    """The slots of all tokens by ascending expert.

    Attributes:
        slot: `[N k]` int64, sorted position to slot; the token is slot // k.
        place: `[N, k]` int64, slot to sorted position.
        counts: `[E]` int64, slots of each expert.
        offsets: `[E + 1]` int32, first sorted position of each expert, and the end.
    """

    slot: Tensor
    place: Tensor
    counts: Tensor
    offsets: Tensor


class ExpertTiles(NamedTuple):
    """Tiles of sorted slots.

    Attributes:
        expert: `[tiles]` int32, E for tiles beyond the last; their number needs no look at data.
        first: `[E + 1]` int32, first tile of each expert, and the end.
    """

    expert: Tensor
    first: Tensor


def sort_slots(topk_idx: Tensor, experts: int) -> SortedSlots:
    """Sort slots by expert; slots of one expert stay in order.

    Args:
        topk_idx: `[N, k]` expert of each slot.
        experts: Number of experts.
    """
    flat = topk_idx.flatten().int()  # half the passes of a 64-bit sort
    slot = torch.sort(flat, stable=True).indices
    place = torch.empty_like(slot)
    place[slot] = torch.arange(len(slot), device=slot.device)
    counts = torch.zeros(experts, dtype=torch.int64, device=slot.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(slot))
    return SortedSlots(slot, place.view(topk_idx.shape), counts, _edges(counts))


def cut_tiles(counts: Tensor, rows: int, slots: int) -> ExpertTiles:
    """Cut each expert's slots into tiles, without waiting for the device.

    Args:
        counts: `[E]` slots of each expert.
        rows: Slots of a full tile.
        slots: Upper bound of the sum of `counts`.
    """
    first = _edges((counts + rows - 1) // rows)
    most = min(len(counts), slots) + slots // rows
    tile = torch.arange(most, dtype=torch.int32, device=counts.device)
    expert = torch.searchsorted(first[1:].contiguous(), tile, right=True, out_int32=True)
    return ExpertTiles(expert, first)


def _edges(counts: Tensor) -> Tensor:
    edges = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=edges[1:])
    return edges
