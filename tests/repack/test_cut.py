import copy
import json
import re
from pathlib import Path

import pytest

from k3quant.checkpoint.reader import TensorEntry, open_checkpoint
from k3quant.errors import ExitCode, SchemaError, UsageError
from k3quant.models.k3_config import LayerKind, read_config
from k3quant.models.k3_tensors import accepted_shapes, shard_tensors, tensors
from k3quant.repack.cut import CUT_FILE, cut_entries, plan_cut
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings
from k3quant.synth.run import synth


def _cut(source: Path, out: Path, **spans: tuple[int, int]) -> Path:
    run_repack(source, out, RepackSettings(**spans))
    return out


def test_layers_are_counted_anew(k3_config):
    cut = plan_cut(k3_config, layers=(12, 23), experts=None)
    text = cut.config["text_config"]
    assert text["num_hidden_layers"] == 12
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 8, 12]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert text["first_k_dense_replace"] == 0
    assert cut.result.moe_layers == tuple(range(12))
    assert cut.result.vision == cut.source.vision
    assert set(cut.changes) == {
        "num_hidden_layers",
        "first_k_dense_replace",
        "kda_layers",
        "full_attn_layers",
    }


def test_experts_are_counted_anew_and_top_k_follows(k3_config):
    cut = plan_cut(k3_config, layers=None, experts=(100, 107))
    moe = cut.result.moe
    assert (moe.num_experts, moe.num_experts_per_token) == (8, 8)
    assert (moe.num_expert_group, moe.topk_group) == (1, 1)
    assert cut.changes == {"num_experts": [896, 8], "num_experts_per_token": [16, 8]}


def test_the_source_config_is_left_alone(k3_config):
    before = copy.deepcopy(k3_config)
    plan_cut(k3_config, layers=(0, 11), experts=(0, 7))
    assert k3_config == before


@pytest.mark.parametrize(
    ("layers", "kinds", "dense"),
    [
        pytest.param((0, 0), "K", 1, id="the dense layer"),
        pytest.param((0, 3), "KKKM", 1, id="from the first"),
        pytest.param((1, 2), "KK", 0, id="within a block"),
        pytest.param((92, 92), "M", 0, id="the last layer"),
        pytest.param((84, 92), "KKKMKKKMM", 0, id="the last block"),
    ],
)
def test_kinds_of_layers_stay(k3_config, layers, kinds, dense):
    result = plan_cut(k3_config, layers=layers, experts=None).result
    assert "".join("K" if k is LayerKind.KDA else "M" for k in result.layer_kinds) == kinds
    assert result.first_k_dense_replace == dense


@pytest.mark.parametrize(
    ("layers", "hint"),
    [
        ((5, 17), "`0-17`, `5-11` or `12-17` keep them"),
        ((11, 12), "`0-12`, `11-11` or `12-12` keep them"),
    ],
)
def test_layers_that_would_move_a_residual_block_are_refused(k3_config, layers, hint):
    with pytest.raises(UsageError, match="attention-residual block of 12 layers") as caught:
        plan_cut(k3_config, layers=layers, experts=None)
    assert hint in caught.value.hint


def test_without_residual_blocks_any_layers_will_do(tiny_config):
    config = tiny_config(kinds="KMKMK", block=None)
    assert plan_cut(config, layers=(1, 3), experts=None).result.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"layers": (90, 93), "experts": None}, "layers: expected a range within 0-92, got 90-93"),
        ({"layers": None, "experts": (0, 896)}, "experts: expected a range within 0-895, got"),
    ],
)
def test_ranges_beyond_the_model_are_refused(k3_config, spans, message):
    with pytest.raises(UsageError, match=message) as caught:
        plan_cut(k3_config, **spans)
    assert caught.value.exit_code is ExitCode.USAGE


def test_moe_layer_frequency_must_keep_its_beat(tiny_config):
    config = tiny_config(kinds="KKKK", block=None)
    config["text_config"]["moe_layer_freq"] = 2
    assert plan_cut(config, layers=(2, 3), experts=None).result.moe_layers == (0,)
    with pytest.raises(UsageError, match="multiple of moe_layer_freq 2"):
        plan_cut(config, layers=(1, 3), experts=None)


def test_expert_groups_are_cut_whole(tiny_config):
    config = tiny_config(experts=8)
    config["text_config"] |= {"num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3}
    moe = plan_cut(config, layers=None, experts=(2, 3)).result.moe
    assert (moe.num_expert_group, moe.topk_group, moe.num_experts_per_token) == (1, 1, 2)
    with pytest.raises(UsageError, match="whole groups of 2 experts, got 1-2"):
        plan_cut(config, layers=None, experts=(1, 2))


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        pytest.param("re:.*self_attn.*", True, id="every layer"),
        pytest.param("language_model.lm_head", True, id="a global"),
        pytest.param("re:.*layers\\.1\\..*", False, id="a layer by expression"),
        pytest.param("language_model.model.layers.1.self_attn.q_proj", False, id="a layer"),
        pytest.param("re:(", False, id="no expression"),
    ],
)
def test_ignore_lists_must_mean_the_same_after_counting_anew(tiny_config, entry, fits):
    config = tiny_config()
    config["text_config"]["quantization_config"]["ignore"] = [entry]
    if fits:
        plan_cut(config, layers=(1, 2), experts=None)
        return
    with pytest.raises(SchemaError, match=re.escape(f"got `{entry}`")):
        plan_cut(config, layers=(1, 2), experts=None)


def test_a_cut_is_a_whole_checkpoint_of_its_config(tiny, tmp_path):
    out = _cut(tiny, tmp_path / "out", layers=(0, 2), experts=(1, 3))
    checkpoint = open_checkpoint(out)
    table = {spec.name: spec for spec in tensors(read_config(checkpoint.config))}
    assert checkpoint.entries.keys() == table.keys()
    for name, entry in checkpoint.entries.items():
        assert (entry.dtype, entry.shape) == (table[name].dtype, table[name].shape)


def test_every_tensor_of_a_cut_is_the_sources(tiny, tmp_path):
    out = _cut(tiny, tmp_path / "out", layers=(1, 2), experts=(1, 3))
    source, cut = open_checkpoint(tiny), open_checkpoint(out)
    configs = read_config(source.config), read_config(cut.config)
    seen = set()
    for layer in (0, 1):
        old = {(s.role, s.part, s.expert): s for s in shard_tensors(configs[0], layer + 2)}
        for spec in shard_tensors(configs[1], layer + 1):
            expert = None if spec.expert is None else spec.expert + 1
            before = source.read(old[spec.role, spec.part, expert].name)
            if spec.role in ("moe.gate", "moe.bias"):
                row = len(before) // 5
                before = before[row : 4 * row]
            assert cut.read(spec.name).tobytes() == before.tobytes()
            seen.add(spec.name)
    for name in cut.entries.keys() - seen:
        assert cut.read(name).tobytes() == source.read(name).tobytes()


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param({"layers": (1, 2)}, id="layers"),
        pytest.param({"experts": (2, 4)}, id="experts"),
        pytest.param({"layers": (3, 3), "experts": (0, 0)}, id="both"),
    ],
)
def test_a_synthetic_cut_equals_the_cut_of_a_synthetic_checkpoint(
    tiny, tmp_path, files, tiny_config, spans
):
    out = _cut(tiny, tmp_path / "out", **spans)
    synth(tiny_config(vision=True), tmp_path / "direct", sparse=False, seed=1, **spans)
    cut, direct = files(out), files(tmp_path / "direct")
    shards = {name for name in cut if not name.endswith((".json", ".md"))}
    assert shards == {name for name in direct if not name.endswith((".json", ".md"))}
    for name in [*shards, "model.safetensors.index.json", "config.json"]:
        assert cut[name] == direct[name]


def test_a_cut_of_a_cut_is_the_cut_of_both(tiny, tmp_path, files):
    first = _cut(tiny, tmp_path / "first", layers=(0, 2), experts=(1, 4))
    second = _cut(first, tmp_path / "second", layers=(1, 2), experts=(1, 2))
    both = _cut(tiny, tmp_path / "both", layers=(1, 2), experts=(2, 3))
    left, right = files(second), files(both)
    record = json.loads(left.pop(CUT_FILE))
    right.pop(CUT_FILE)
    assert left == right
    assert record["previous"]["experts"] == [1, 4]
    assert record["previous"]["previous"] is None


def test_the_cut_is_recorded(tiny, tmp_path):
    out = _cut(tiny, tmp_path / "out", layers=(1, 2))
    assert json.loads((out / CUT_FILE).read_text()) == {
        "source": "source",
        "layers": [1, 2],
        "experts": [0, 4],
        "source_layers": 4,
        "source_experts": 5,
        "config_changes": {
            "num_hidden_layers": [4, 2],
            "first_k_dense_replace": [1, 0],
            "kda_layers": [[1, 2, 3], [1, 2]],
            "full_attn_layers": [[4], []],
        },
        "previous": None,
    }


def _entry(*shape: int) -> TensorEntry:
    return TensorEntry("U8", shape, "x.safetensors", 100, shape[0])


def test_tensors_of_another_spelling_move_with_their_module(tiny_config):
    cut = plan_cut(tiny_config(), layers=(1, 2), experts=(1, 3))
    stem = "language_model.model.layers.2.block_sparse_moe.experts"
    kept = cut_entries(
        cut, {f"{stem}.{expert}.w1.weight_scale_2": _entry(4) for expert in range(5)}
    )
    stem = "language_model.model.layers.1.block_sparse_moe.experts"
    assert set(kept) == {f"{stem}.{expert}.w1.weight_scale_2" for expert in range(3)}


@pytest.mark.parametrize(
    "name",
    [
        "extra.weight",
        "language_model.model.layers.9.self_attn.A_log",
        "language_model.model.layers.1.block_sparse_moe.gate.weight_scale",
    ],
)
def test_tensors_that_a_cut_cannot_divide_are_refused(tiny_config, name):
    cut = plan_cut(tiny_config(), layers=(1, 2), experts=None)
    with pytest.raises(SchemaError, match=f"tensor {name}: expected only tensors"):
        cut_entries(cut, {name: _entry(4)})


def test_a_router_of_other_rows_is_refused(tiny_config):
    cut = plan_cut(tiny_config(), layers=None, experts=(0, 1))
    name = "language_model.model.layers.1.block_sparse_moe.gate.weight"
    with pytest.raises(SchemaError, match=r"one row for each of 5 experts, got shape \[6\]"):
        cut_entries(cut, {name: _entry(6)})


def test_an_a_log_cut_to_its_heads_stays_as_it_is(tiny_config):
    config = tiny_config()
    cut = plan_cut(config, layers=(1, 2), experts=None)
    spec = next(s for s in shard_tensors(cut.source, 2) if s.role == "kda.A_log")
    assert (2,) in accepted_shapes(cut.source, spec)
    kept = cut_entries(cut, {spec.name: _entry(2)})
    assert [entry.shape for entry in kept.values()] == [(2,)]
