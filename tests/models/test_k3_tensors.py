import copy
import csv
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import encode_index
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.models.k3_config import read_config
from k3quant.models.k3_counts import count_model
from k3quant.models.k3_layout import ReleasedLayout
from k3quant.models.k3_tensors import Family, num_shards, shard_name, shard_tensors, tensors


def released_shards(data: Path) -> list[dict[str, str]]:
    with (data / "kimi-k3" / "shards.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_weight_map_is_the_released_one_entry_for_entry(
    k3_config: dict[str, Any], data: Path
) -> None:
    raw = gzip.decompress((data / "kimi-k3" / "model.safetensors.index.json.gz").read_bytes())
    config = read_config(k3_config)
    ours = {spec.name: shard_name(config, spec.shard) for spec in tensors(config)}
    assert len(ours) == 497_220
    assert ours == json.loads(raw)["weight_map"]


def test_every_header_and_file_size_is_the_released_one(
    k3_config: dict[str, Any], data: Path
) -> None:
    config = read_config(k3_config)
    rows = released_shards(data)
    assert num_shards(config) == len(rows) == 96
    for number, row in enumerate(rows, start=1):
        specs = shard_tensors(config, number)
        header, placed = encode_header((s.name, s.dtype, s.shape) for s in specs)
        assert shard_name(config, number) == row["file"]
        assert hashlib.sha256(header[8:]).hexdigest() == row["header_sha256"], row["file"]
        size = len(header) + max(entry.end for entry in placed.values())
        assert (size, len(placed)) == (int(row["bytes"]), int(row["tensors"]))


def test_predicted_layout_equals_the_encoded_one(k3_config: dict[str, Any], data: Path) -> None:
    config = read_config(k3_config)
    layout = ReleasedLayout(config, packed=True)
    for shard, row in zip(layout.shards(), released_shards(data), strict=True):
        assert hashlib.sha256(shard.header[8:]).hexdigest() == row["header_sha256"]
        assert (shard.file_bytes, shard.num_tensors) == (int(row["bytes"]), int(row["tensors"]))
    weight_map = {spec.name: shard_name(config, spec.shard) for spec in tensors(config)}
    assert layout.index() == encode_index(weight_map, 1_560_860_324_864)


def test_totals_are_the_published_ones(k3_config: dict[str, Any]) -> None:
    counts = count_model(read_config(k3_config))
    assert counts.tensors == 497_220
    assert counts.parameters == 2_779_931_837_184
    assert counts.active_parameters == 104_189_614_848
    assert counts.tensor_bytes == 1_560_860_324_864
    assert counts.families[Family.ROUTED_EXPERTS].tensor_bytes == 1_446_456_066_048
    assert counts.families[Family.VISION].parameters == 401_214_464


def test_layer_pattern_is_read_from_the_lists(k3_config: dict[str, Any]) -> None:
    config = read_config(k3_config)
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"]
    assert len(mla) == 24
    assert mla == [*range(3, 92, 4), 92]


@pytest.mark.parametrize("which", ["nano", "oracle"])
def test_table_of_a_small_checkpoint_is_what_its_files_hold(
    which: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(which))
    config = read_config(checkpoint.config)
    ours = {s.name: (s.dtype, s.shape, shard_name(config, s.shard)) for s in tensors(config)}
    theirs = {n: (e.dtype, e.shape, e.file) for n, e in checkpoint.entries.items()}
    assert ours == theirs


def test_text_only_cut_has_no_vision_tensors_or_shards(k3_config: dict[str, Any]) -> None:
    cut = copy.deepcopy(k3_config)
    del cut["vision_config"]
    config = read_config(cut)
    assert num_shards(config) == 94
    counts = count_model(config)
    assert (counts.tensors, counts.tensor_bytes) == (497_052, 1_559_965_606_912)


def kimi_linear() -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


def test_flat_kimi_linear_config_has_its_own_names_and_shapes() -> None:
    config = read_config(kimi_linear())
    specs = {spec.name: spec for spec in tensors(config)}
    assert specs["model.layers.0.self_attn.g_a_proj.weight"].shape == (128, 2304)
    assert specs["model.layers.0.self_attn.g_b_proj.weight"].shape == (4096, 128)
    assert specs["model.layers.3.self_attn.q_proj.weight"].shape == (32 * 192, 2304)
    assert specs["model.layers.1.block_sparse_moe.experts.255.w2.weight"].dtype == "BF16"
    assert "lm_head.weight" in specs
    assert "model.layers.3.self_attn.g_proj.weight" not in specs
    assert not [name for name in specs if "res_proj" in name or "routed_expert" in name]
    # 48 B parameters with 3 B active is how the model is published
    counts = count_model(config)
    assert 48e9 < counts.parameters < 50e9
    assert 3e9 < counts.active_parameters < 3.6e9


def test_same_name_of_both_attention_kinds_follows_the_layer_lists(
    cases: Path,
) -> None:
    document = json.loads((cases / "base" / "config.json").read_text())
    roles = [
        s.role for s in tensors(read_config(document)) if s.name.endswith("attn.g_proj.weight")
    ]
    assert roles == ["kda.g_proj", "kda.g_proj", "mla.g_proj"]
    linear = document["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = [3], [1, 2]
    roles = [
        s.role for s in tensors(read_config(document)) if s.name.endswith("attn.g_proj.weight")
    ]
    assert roles == ["mla.g_proj", "mla.g_proj", "kda.g_proj"]
