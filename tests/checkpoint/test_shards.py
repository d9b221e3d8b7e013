from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.shards import (
    Item,
    ShardPlan,
    expert_rank,
    plan_by_home,
    plan_by_layer,
    plan_by_rank,
    plan_by_size,
)
from k3quant.errors import ExitCode, UsageError


def _item(name: str, size: int, **place: int) -> Item:
    return Item(name, "U8", (size,), size, "home", **place)


def _experts(layers: int, experts: int, size: int = 100) -> list[Item]:
    items = []
    for layer in range(layers):
        items.append(_item(f"{layer}.norm", size, layer=layer))
        for expert in range(experts):
            for part in ("packed", "scale"):
                name = f"{layer}.experts.{expert}.{part}"
                items.append(_item(name, size, layer=layer, expert=expert))
    return [*items, _item("embed", size)]


def _names(plan: ShardPlan) -> list[list[str]]:
    return [[item.name for item in shard.items] for shard in plan.files]


def _file_bytes(items: tuple[Item, ...]) -> int:
    header, _ = encode_header((item.name, item.dtype, item.shape) for item in items)
    return len(header) + sum(item.size for item in items)


def test_without_a_limit_one_file_holds_all_in_order():
    plan = plan_by_size([_item("b", 5), _item("a", 7)], limit=None)
    assert [shard.file for shard in plan.files] == ["model.safetensors"]
    assert _names(plan) == [["b", "a"]]


def test_files_are_numbered_as_in_the_release():
    plan = plan_by_size([_item("b", 500), _item("a", 700)], limit=1000)
    assert [shard.file for shard in plan.files] == [
        "model-00001-of-000002.safetensors",
        "model-00002-of-000002.safetensors",
    ]


def test_nothing_makes_no_file():
    assert plan_by_size([], limit=100).files == ()
    assert plan_by_size([], limit=None).files == ()


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
    limit=st.integers(600, 5000),
)
def test_every_tensor_lies_once_in_a_file_within_the_limit(sizes: list[int], limit: int):
    items = [_item(f"tensor.{i}.重", size) for i, size in enumerate(sizes)]
    plan = plan_by_size(items, limit=limit)
    assert [item for shard in plan.files for item in shard.items] == items
    for shard in plan.files:
        assert _file_bytes(shard.items) <= limit or shard.items[0] in plan.oversized
        assert len(shard.items) == 1 or not set(shard.items) & set(plan.oversized)
    for left, right in pairwise(plan.files):
        # Only the bound on the digits of offsets keeps a file from being fuller.
        slack = 28 * (len(left.items) + 1)
        assert _file_bytes((*left.items, right.items[0])) + slack > limit


@pytest.mark.parametrize("limit", [1, 16, 200])
def test_a_tensor_above_the_limit_has_a_file_of_its_own(limit: int):
    items = [_item("a", 300), _item("b", 400)]
    plan = plan_by_size(items, limit=limit)
    assert _names(plan) == [["a"], ["b"]]
    assert plan.oversized == tuple(items)


def test_an_expert_stays_whole_where_it_fits():
    items = _experts(1, 3, size=1000)
    plan = plan_by_size(items, limit=2700)
    assert _names(plan) == [
        ["0.norm"],
        ["0.experts.0.packed", "0.experts.0.scale"],
        ["0.experts.1.packed", "0.experts.1.scale"],
        ["0.experts.2.packed", "0.experts.2.scale"],
        ["embed"],
    ]
    assert plan.oversized == ()


def test_an_expert_above_the_limit_is_split_by_tensor():
    plan = plan_by_size(_experts(1, 1, size=1000), limit=1400)
    assert _names(plan) == [
        ["0.norm"],
        ["0.experts.0.packed"],
        ["0.experts.0.scale"],
        ["embed"],
    ]
    assert plan.oversized == ()


def test_a_layer_has_files_of_its_own():
    plan = plan_by_layer(_experts(2, 2))
    assert [shard.file for shard in plan.files] == [
        "model-layer-00000.safetensors",
        "model-layer-00001.safetensors",
        "model-globals.safetensors",
    ]
    assert {item.layer for item in plan.files[1].items} == {1}


def test_a_layer_above_the_limit_is_split():
    plan = plan_by_layer(_experts(2, 2, size=1000), limit=4000)
    assert [shard.file for shard in plan.files][:2] == [
        "model-layer-00000-00001-of-000002.safetensors",
        "model-layer-00000-00002-of-000002.safetensors",
    ]


def test_homes_are_kept():
    items = [
        Item("b", "U8", (1,), 1, "y"),
        Item("a", "U8", (1,), 1, "x"),
        Item("c", "U8", (1,), 1, "y"),
    ]
    plan = plan_by_home(items)
    assert [(s.file, [i.name for i in s.items]) for s in plan.files] == [
        ("x", ["a"]),
        ("y", ["b", "c"]),
    ]


def test_a_rank_has_its_experts_and_an_index_with_the_shared_files():
    plan = plan_by_rank(_experts(2, 4), num_experts=4, ranks=2)
    files = {shard.file: shard.items for shard in plan.files}
    assert list(files) == [
        "model-shared.safetensors",
        "model-rank-00000-of-000002.safetensors",
        "model-rank-00001-of-000002.safetensors",
    ]
    assert {item.expert for item in files["model-rank-00001-of-000002.safetensors"]} == {2, 3}
    assert {item.expert for item in files["model-shared.safetensors"]} == {None}
    assert plan.indexes == {
        "model.safetensors.index.rank-00000-of-000002.json": (
            "model-shared.safetensors",
            "model-rank-00000-of-000002.safetensors",
        ),
        "model.safetensors.index.rank-00001-of-000002.json": (
            "model-shared.safetensors",
            "model-rank-00001-of-000002.safetensors",
        ),
    }


def test_the_files_of_a_rank_keep_the_limit():
    plan = plan_by_rank(_experts(4, 4, size=1000), num_experts=4, ranks=2, limit=5000)
    assert all(_file_bytes(shard.items) <= 5000 for shard in plan.files)
    index = plan.indexes["model.safetensors.index.rank-00000-of-000002.json"]
    assert "model-rank-00000-of-000002-00001-of-000004.safetensors" in index
    assert "model-shared-00001-of-000002.safetensors" in index


@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [
        pytest.param(896, 32, [28] * 32, id="even"),
        pytest.param(7, 3, [3, 2, 2], id="uneven"),
        pytest.param(5, 5, [1] * 5, id="one each"),
        pytest.param(5, 1, [5], id="one rank"),
    ],
)
def test_ranks_take_contiguous_experts(experts: int, ranks: int, counts: list[int]):
    held = [expert_rank(expert, experts, ranks) for expert in range(experts)]
    assert held == [rank for rank, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("ranks", [0, 5, -1])
def test_more_ranks_than_experts_are_refused(ranks: int):
    with pytest.raises(UsageError, match=f"expected 1 to 4, got {ranks}") as caught:
        plan_by_rank(_experts(1, 4), num_experts=4, ranks=ranks)
    assert caught.value.exit_code is ExitCode.USAGE
