from dataclasses import replace

import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import RefusedError, SchemaError
from k3quant.models.k3_config import LayerKind, read_config
from k3quant.models.k3_tensors import num_shards, shard_tensors, tensors
from k3quant.schemes.gguf_tensors import NAMES, plan_bundles, stored_type, target_name


@pytest.fixture
def config(k3_config):
    return read_config(k3_config)


def _names(config, layer):
    specs = shard_tensors(config, layer + 1, packed=True)
    return {spec.name.rpartition(f"layers.{layer}.")[2]: spec for spec in specs}


def test_gate_is_named_by_the_kind_of_its_layer(config):
    kinds = list(config.layer_kinds)
    assert kinds[2:4] == [LayerKind.KDA, LayerKind.MLA]
    kinds[2:4] = kinds[3:1:-1]
    swapped = replace(config, layer_kinds=tuple(kinds))
    gate = "self_attn.g_proj.weight"
    found = [[target_name(_names(c, layer)[gate]) for layer in (2, 3)] for c in (config, swapped)]
    assert found == [
        ["blk.2.ssm_g.weight", "blk.3.attn_gate.weight"],
        ["blk.2.attn_gate.weight", "blk.3.ssm_g.weight"],
    ]
    shapes = {spec.shape for c in (config, swapped) for spec in [_names(c, 2)[gate]]}
    assert len(shapes) == 1  # nothing but the kind tells them apart


def test_every_text_role_is_named_or_folded(config):
    last = config.num_hidden_layers + 1
    roles = {s.role for shard in (1, 2, 4, last) for s in shard_tensors(config, shard)}
    folded = {
        "mla.kv_b_proj", "self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm",
        "mlp_res_proj", "output_attn_res_norm", "output_attn_res_proj",
    }  # fmt: skip
    assert roles - set(NAMES) == folded


def test_names_within_a_layer_are_distinct(config):
    for layer in (0, 1, 3):
        roles = {s.role for s in _names(config, layer).values()} & set(NAMES)
        assert len({NAMES[role] for role in roles}) == len(roles)


def test_role_without_a_name_is_refused(config):
    vision = shard_tensors(config, num_shards(config))[0]
    with pytest.raises(RefusedError, match="expected a role of architecture `kimi-k3`"):
        target_name(vision)


_F32 = """
    norm input_layernorm post_attention_layernorm kda.q_conv1d kda.k_conv1d kda.v_conv1d
    kda.dt_bias kda.A_log kda.o_norm mla.q_a_layernorm mla.kv_a_layernorm moe.gate moe.bias
    moe.latent_norm
""".split()


@pytest.mark.parametrize("float_type", ["BF16", "Q8_0"])
def test_what_stays_float32(config, float_type):
    kept = set()
    for spec in tensors(replace(config, moe=replace(config.moe, num_experts=16)), packed=True):
        if spec.part == "weight" and spec.role in NAMES:
            dtype = stored_type(target_name(spec), spec.role, spec.shape, float_type)
            assert dtype in ("F32", float_type)
            if dtype == "F32":
                kept.add(spec.role)
    assert kept == set(_F32)


def test_matrix_without_whole_blocks_is_refused_by_name(base):
    checkpoint = open_checkpoint(base)
    config = read_config(checkpoint.config)
    assert list(plan_bundles(config, checkpoint, packed=True, float_type="BF16"))
    with pytest.raises(SchemaError, match=r"tensor blk\.\S+ as Q8_0: .* blocks of 32, got \d+"):
        list(plan_bundles(config, checkpoint, packed=True, float_type="Q8_0"))
