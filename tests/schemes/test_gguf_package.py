"""The reader of the `gguf` package, which llama.cpp's own tools use, on an export."""

import math

import numpy as np
import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.schemes.gguf import plan_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def checkpoint(nano):
    return open_checkpoint(nano)


@pytest.fixture(scope="module", params=["BF16", "Q8_0"])
def exported(request, nano, checkpoint, export, tmp_path_factory):
    """Export the small checkpoint: the plan, and the package's reader on its file."""
    out = tmp_path_factory.mktemp("gguf") / "out"
    plan = plan_gguf(checkpoint, float_type=request.param)
    export(nano, plan, out)
    return request.param, plan.files[0], gguf.GGUFReader(out / "model.gguf")


def test_every_tensor_is_where_the_plan_put_it(exported):
    _, file, reader = exported
    places = {t.name: (t.data_offset, t.data_offset + t.n_bytes) for t in reader.tensors}
    assert places == dict(file.places)


def test_shapes_and_types(exported):
    float_type, _, reader = exported
    found = {t.name: (t.tensor_type.name, tuple(map(int, t.shape))) for t in reader.tensors}
    expected = {
        "token_embd.weight": (float_type, (128, 2304)),
        "blk.0.ssm_a": ("F32", (4,)),
        "blk.0.ssm_conv1d_q.weight": ("F32", (4, 1, 128, 1)),
        "blk.3.attn_k_b.weight": (float_type, (32, 64, 4)),
        "blk.3.attn_v_b.weight": (float_type, (64, 32, 4)),
        "blk.1.ffn_down_exps.weight": ("MXFP4", (96, 64, 32)),
        "blk.1.ffn_gate_inp.weight": ("F32", (128, 32)),
    }
    assert {name: found[name] for name in expected} == expected


def test_metadata(exported):
    _, _, reader = exported
    expected = {
        "general.architecture": "kimi-k3",
        "kimi-k3.attention.head_count_kv": [0, 0, 0, 1, 0, 0, 0, 1, 1],
        "kimi-k3.attention.key_length_mla": 48,
        "kimi-k3.kda.gate_lower_bound": -5.0,
        "kimi-k3.expert_weights_norm": True,
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.eos_token_id": 2050,
    }
    assert {key: reader.get_field(key).contents() for key in expected} == expected
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 2304


def test_experts_decode_to_the_values_of_the_source(exported, nano, read_tensors):
    _, _, reader = exported
    source = read_tensors(nano)
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up_exps.weight")
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert found.shape == (32, 96, 64)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((magnitudes, -magnitudes))
    for expert in (0, 31):
        module = f"language_model.model.layers.1.block_sparse_moe.experts.{expert}.w3"
        packed = source[f"{module}.weight_packed"]
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(96, 2, 32)
        scales = np.exp2(source[f"{module}.weight_scale"].astype(np.float64) - 127)
        assert np.array_equal(found[expert], (values[codes] * scales[..., None]).reshape(96, 64))


def test_parts_are_read_one_by_one(nano, checkpoint, export, tmp_path):
    plan = plan_gguf(checkpoint, max_file_bytes=2_600_000)
    export(nano, plan, tmp_path / "out")
    readers = [gguf.GGUFReader(tmp_path / "out" / file.name) for file in plan.files]
    assert [reader.get_field("split.no").contents() for reader in readers] == [0, 1, 2]
    assert sum(len(reader.tensors) for reader in readers) == 242
    elements = sum(math.prod(map(int, t.shape)) for reader in readers for t in reader.tensors)
    assert elements == 7_058_264
