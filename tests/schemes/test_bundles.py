import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.models.k3_config import read_config
from k3quant.models.k3_tensors import Family, layer_tensors
from k3quant.schemes.bundles import (
    Bundle,
    OutputTensor,
    experts_are_packed,
    fill_files,
    forecast,
    weight_name,
)


def _bundle(size: int, *, family: Family = Family.KDA, weights: int = 1) -> Bundle:
    return Bundle(
        tensors=(OutputTensor(f"t{size}", "F32", (size,), size),),
        units=(),
        family=family,
        weights=weights,
        source_bytes=2 * size,
        target="F32",
    )


def _sizes(sizes: list[int], max_bytes: int | None, **costs: int) -> list[list[int]]:
    files = fill_files(
        [_bundle(size) for size in sizes], max_bytes=max_bytes, cost=lambda b: b.num_bytes, **costs
    )
    return [[bundle.num_bytes for bundle in file] for file in files]


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "expected"),
    [
        ([4, 4, 4], None, [[4, 4, 4]]),
        ([4, 4, 4], 8, [[4, 4], [4]]),
        ([4, 4, 4], 7, [[4], [4], [4]]),
        ([9, 1, 1], 8, [[9], [1, 1]]),
        ([1, 9, 1], 8, [[1], [9], [1]]),
        ([], 8, [[]]),
    ],
    ids="unbounded full none-fits-twice large-first large-between empty".split(),
)
def test_files_fill_in_order(sizes, max_bytes, expected):
    assert _sizes(sizes, max_bytes) == expected


def test_headers_count():
    assert _sizes([4, 4, 4, 4], 9, first_cost=5, other_cost=1) == [[4], [4, 4], [4]]


def test_forecast_sums_by_family_and_target():
    bundles = [_bundle(3), _bundle(5, family=Family.ROUTED_EXPERTS, weights=2), _bundle(4)]
    found = [(f.family, f.tensors, f.source_bytes, f.target_bytes) for f in forecast(bundles)]
    assert found == [(Family.ROUTED_EXPERTS, 2, 10, 5), (Family.KDA, 2, 14, 7)]


def test_weight_is_called_by_its_module_or_its_own_name(k3_config):
    specs = layer_tensors(read_config(k3_config), 1, packed=True)
    names = {weight_name(spec).rpartition("layers.1.")[2] for spec in specs}
    assert {
        "self_attn.q_proj",
        "self_attn.A_log",
        "self_attn.dt_bias",
        "block_sparse_moe.gate",
        "block_sparse_moe.gate.e_score_correction_bias",
        "block_sparse_moe.experts.0.w1",
    } <= names


def test_tensors_say_whether_experts_are_packed(base, rewrite):
    assert experts_are_packed(open_checkpoint(base))
    rewrite(base, lambda n, d, a: None if n.endswith(("_packed", "_scale")) else (d, a))
    assert not experts_are_packed(open_checkpoint(base))
