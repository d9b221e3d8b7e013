from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from k3quant.kernels.expert_tiles import sort_slots
from k3quant.kernels.moe_accumulate import moe_accumulate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("cuts", [(0, 35), (0, 5, 5, 17, 35)], ids=["whole", "in-pieces"])
def test_pieces_add_up_to_each_tokens_sum(
    device: str, error_ratio: Callable[..., float], dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(3)
    idx = torch.stack([torch.randperm(6, generator=generator)[:5] for _ in range(7)]).sort(-1)[0]
    weight = torch.rand((7, 5), generator=generator)
    order = sort_slots(idx.to(device), 6)
    out = torch.randn((35, 1030), generator=generator).to(dtype).to(device)
    before = torch.randn((7, 1030), generator=generator)
    total = before.clone().to(device)
    for start, end in pairwise(cuts):
        moe_accumulate(out[start:end], order.place, weight.to(device), total, start)
    terms = out.float().cpu()[order.place.cpu()] * weight[..., None]
    assert error_ratio(total, before + terms.sum(1)) < 1e-6


def test_tokens_without_a_slot_in_the_run_keep_their_bits(
    device: str, same_bits: Callable[..., bool]
) -> None:
    place = torch.tensor([[0, 1], [2, 3]], device=device)
    weight = torch.ones((2, 2), device=device)
    total = torch.full((2, 8), float("nan"), device=device)
    total[0] = 1
    moe_accumulate(torch.ones((2, 8), device=device), place, weight, total, 0)
    assert bool((total[0] == 3).all())
    assert bool(total[1].isnan().all())
