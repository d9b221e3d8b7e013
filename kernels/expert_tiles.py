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
        offsets: `[E + 1]` int32, first sorted position of each expert, and the end.
    """

    slot: Tensor
    place: Tensor
    offsets: Tensor


class ExpertTiles(NamedTuple):
    """Tiles of sorted slots.

    Attributes:
        expert: `[tiles]` int32.
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
    # Half the passes of a 64-bit sort.
    by_expert, slot = torch.sort(topk_idx.flatten().int(), stable=True)
    place = torch.empty_like(slot)
    place[slot] = torch.arange(len(slot), device=slot.device)
    edge = torch.arange(experts + 1, dtype=torch.int32, device=slot.device)
    offsets = torch.searchsorted(by_expert, edge, out_int32=True)
    return SortedSlots(slot, place.view(topk_idx.shape), offsets)


def cut_tiles(offsets: Tensor, slots: int, rows: int) -> ExpertTiles:
    """Cut each expert's slots into tiles; waits for their number.

    Args:
        offsets: `[E + 1]` int32, first slot of each expert, and the end.
        slots: That end.
        rows: Slots of a full tile.
    """
    first = torch.zeros_like(offsets)
    tiles = (offsets.diff() + rows - 1) // rows
    torch.cumsum(tiles, 0, dtype=torch.int32, out=first[1:])
    # All is under way before the wait: each expert adds at most one tile that is not full.
    most = slots // rows + min(slots, len(offsets) - 1)
    tile = torch.arange(most, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(first[1:].contiguous(), tile, right=True, out_int32=True)
    return ExpertTiles(expert[: int(first[-1])], first)
