import json
import math
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import (
    IncompleteError,
    RefusedError,
    SchemaError,
    UsageError,
    ValuesError,
)
from k3quant.models.k3_config import read_config
from k3quant.schemes.gguf import plan_gguf

_L = "language_model.model.layers."
_SCALARS = {2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}


class _Reader:
    """A GGUF file parsed from its specification, apart from the code that writes it."""

    def __init__(self, file: Path) -> None:
        self._data, self._at = file.read_bytes(), 0
        assert self._take(4) == b"GGUF"
        version, count, fields = self._unpack("<IQQ")
        assert version == 3
        self.fields = dict(self._field() for _ in range(fields))
        infos = [self._info() for _ in range(count)]
        start = -(-self._at // 32) * 32
        self.types = {name: kind for name, _, kind, _ in infos}
        self.shapes = {name: shape for name, shape, _, _ in infos}
        self.offsets = {name: start + offset for name, _, _, offset in infos}
        self.size = len(self._data)

    def array(self, name: str, dtype: type) -> np.ndarray:
        """Return an unquantized tensor."""
        shape = self.shapes[name]
        return np.frombuffer(
            self._data, dtype, count=math.prod(shape), offset=self.offsets[name]
        ).reshape(shape)

    def blocks(self, name: str, block_bytes: int) -> np.ndarray:
        """Return a tensor of 32-element blocks as `[..., blocks, bytes]`."""
        *lead, cols = self.shapes[name]
        count = math.prod(lead) * cols // 32 * block_bytes
        raw = np.frombuffer(self._data, np.uint8, count=count, offset=self.offsets[name])
        return raw.reshape(*lead, cols // 32, block_bytes)

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _unpack(self, form: str) -> tuple:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _text(self) -> str:
        return self._take(self._unpack("<Q")[0]).decode()

    def _value(self, kind: int) -> object:
        return self._text() if kind == 8 else self._unpack(_SCALARS[kind])[0]

    def _field(self) -> tuple[str, object]:
        key, [kind] = self._text(), self._unpack("<I")
        if kind != 9:
            return key, self._value(kind)
        element, count = self._unpack("<IQ")
        return key, [self._value(element) for _ in range(count)]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, [rank] = self._text(), self._unpack("<I")
        shape = tuple(reversed(self._unpack(f"<{rank}Q")))
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset


@pytest.fixture(scope="module")
def checkpoint(nano):
    return open_checkpoint(nano)


@pytest.fixture(scope="module")
def exported(nano, checkpoint, export, tmp_path_factory):
    """Export the small checkpoint once with the default type: reader and proof."""
    out = tmp_path_factory.mktemp("gguf") / "out"
    proof = export(nano, plan_gguf(checkpoint), out)
    return _Reader(out / "model.gguf"), proof


@pytest.fixture(scope="module")
def source(nano, read_tensors):
    return read_tensors(nano)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_tensors_and_experts_of_the_small_checkpoint(exported):
    reader, _ = exported
    assert len(reader.types) == 242
    assert reader.fields["kimi-k3.expert_count"] == 32
    assert reader.fields["general.file_type"] == 38
    assert reader.size % 32 == 0


def test_tensors_neither_overlap_nor_leave_the_file(exported):
    reader, _ = exported
    block = {0: (1, 4), 30: (1, 2), 39: (32, 17)}
    position = min(reader.offsets.values())
    for name in sorted(reader.offsets, key=reader.offsets.__getitem__):
        elements, size = block[reader.types[name]]
        assert reader.offsets[name] == position
        position += -(-math.prod(reader.shapes[name]) // elements * size // 32) * 32
    assert position == reader.size


@pytest.mark.parametrize(
    ("matrix", "name"),
    [("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")],
    ids=["w1", "w2", "w3"],
)
@pytest.mark.parametrize("layer", [1, 8])
def test_experts_keep_every_bit(exported, source, matrix, name, layer):
    blocks = exported[0].blocks(f"blk.{layer}.{name}.weight", 17)
    for expert in range(32):
        module = f"{_L}{layer}.block_sparse_moe.experts.{expert}.{matrix}"
        packed = source[f"{module}.weight_packed"]
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1, 32)
        assert np.array_equal(blocks[expert, ..., 0], source[f"{module}.weight_scale"])
        assert np.array_equal(blocks[expert, ..., 1:] & 15, codes[..., :16])
        assert np.array_equal(blocks[expert, ..., 1:] >> 4, codes[..., 16:])


def test_matrices_keep_their_bits(exported, source):
    reader, _ = exported
    pairs = {
        "token_embd.weight": "language_model.model.embed_tokens.weight",
        "output.weight": "language_model.lm_head.weight",
        "blk.0.attn_q.weight": f"{_L}0.self_attn.q_proj.weight",
        "blk.0.ssm_g.weight": f"{_L}0.self_attn.g_proj.weight",
        "blk.3.attn_gate.weight": f"{_L}3.self_attn.g_proj.weight",
        "blk.3.attn_kv_a_mqa.weight": f"{_L}3.self_attn.kv_a_proj_with_mqa.weight",
        "blk.8.ffn_down_shexp.weight": f"{_L}8.block_sparse_moe.shared_experts.down_proj.weight",
    }
    for name, stored in pairs.items():
        assert reader.types[name] == 30
        assert np.array_equal(reader.array(name, np.uint16), source[stored])


def test_vectors_and_router_are_widened(exported, source):
    reader, _ = exported
    pairs = {
        "output_norm.weight": "language_model.model.norm.weight",
        "blk.5.ffn_gate_inp.weight": f"{_L}5.block_sparse_moe.gate.weight",
        "blk.3.attn_q_a_norm.weight": f"{_L}3.self_attn.q_a_layernorm.weight",
    }
    for name, stored in pairs.items():
        assert reader.types[name] == 0
        assert np.array_equal(reader.array(name, np.float32), _widen(source[stored]))


def test_float32_parameters_keep_their_bits(exported, source):
    reader, _ = exported
    for name, stored in {
        "blk.1.exp_probs_b.bias": f"{_L}1.block_sparse_moe.gate.e_score_correction_bias",
        "blk.1.ssm_dt.bias": f"{_L}1.self_attn.dt_bias",
        "blk.1.ssm_norm.weight": f"{_L}1.self_attn.o_norm.weight",
    }.items():
        assert np.array_equal(reader.array(name, np.float32), source[stored])


def test_decay_is_minus_exp_of_the_heads_once(exported, source):
    log = source[f"{_L}2.self_attn.A_log"]
    found = exported[0].array("blk.2.ssm_a", np.float32)
    assert (log.shape, found.shape) == ((32,), (4,))
    assert np.array_equal(found, (-np.exp(log[:4].astype(np.float64))).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("blk.4.attn_res_score.weight", f"{_L}4.self_attention_res"),
        ("blk.4.ffn_res_score.weight", f"{_L}4.mlp_res"),
        ("output_res_score.weight", "language_model.model.output_attn_res"),
    ],
    ids="attention feed-forward output".split(),
)
def test_residual_score_is_norm_times_projection(exported, source, name, prefix):
    norm, proj = (_widen(source[f"{prefix}_{kind}.weight"]) for kind in ("norm", "proj"))
    found = exported[0].array(name, np.float32)
    assert np.array_equal(found, norm * proj[0])
    assert np.any(found != norm)


def test_kv_projection_is_split_by_heads(exported, source):
    reader, _ = exported
    by_head = source[f"{_L}3.self_attn.kv_b_proj.weight"].reshape(4, 64, 64)
    k, v = (reader.array(f"blk.3.attn_{part}_b.weight", np.uint16) for part in "kv")
    assert (k.shape, v.shape) == ((4, 64, 32), (4, 32, 64))
    assert np.array_equal(k, by_head[:, :32].transpose(0, 2, 1))
    assert np.array_equal(v, by_head[:, 32:])


def test_convolution_is_reshaped(exported, source):
    found = exported[0].array("blk.6.ssm_conv1d_k.weight", np.float32)
    assert found.shape == (1, 128, 1, 4)
    assert np.array_equal(found[0, :, 0], source[f"{_L}6.self_attn.k_conv1d.weight"][:, 0])


def test_proof_calls_exact_what_is(exported):
    weights = exported[1]["weights"]
    moved = {name for name, record in weights.items() if not record["exact"]}
    assert moved == {f"{_L}{layer}.self_attn.A_log" for layer in (0, 1, 2, 4, 5, 6)}
    # One rounding of float32 is off by at most 2^-25 of a value in its root mean square.
    assert all(0 < weights[name]["rel_rms"] < 2**-24 for name in moved)
    expert = weights[f"{_L}1.block_sparse_moe.experts.0.w1"]
    assert (expert["source"], expert["target"]) == ("mxfp4", "mxfp4-gguf")


def test_every_source_tensor_is_used_or_skipped_with_a_reason(checkpoint):
    plan = plan_gguf(checkpoint)
    used = [name for file in plan.files for unit in file.units for name in unit.sources]
    assert len(used) == len(set(used))
    assert set(used).isdisjoint(plan.skipped)
    assert set(used) | set(plan.skipped) == set(checkpoint.entries)
    assert len(plan.skipped) == 18
    assert all(name.startswith(("vision_tower.", "mm_projector.")) for name in plan.skipped)
    assert set(plan.skipped.values()) == {"vision: the target holds the language model only"}
    assert {"ssm_a", "res_score", "attn_k_b, attn_v_b"} <= set(plan.transforms)


def test_unknown_tensor_is_refused_unless_allowed(writable_nano, rewrite):
    extra = {"extra.weight": ("F32", np.zeros(3, np.float32))}
    rewrite(writable_nano, lambda name, dtype, array: (dtype, array), extra)
    checkpoint = open_checkpoint(writable_nano)
    with pytest.raises(RefusedError, match=r"got extra\.weight") as caught:
        plan_gguf(checkpoint)
    assert caught.value.exit_code == 9
    for allowed in (r"extra\.weight", "extra.*"):
        assert "extra.weight" in plan_gguf(checkpoint, allow_skip=[allowed]).skipped
    with pytest.raises(RefusedError, match=r"got extra\.weight"):
        plan_gguf(checkpoint, allow_skip=["extra"])


def test_missing_tensor_is_refused_by_name(writable_nano, rewrite):
    lost = f"{_L}1.block_sparse_moe.routed_expert_norm.weight"
    rewrite(writable_nano, lambda name, dtype, array: None if name == lost else (dtype, array))
    with pytest.raises(SchemaError, match=re.escape(lost)):
        plan_gguf(open_checkpoint(writable_nano))


def test_missing_expert_is_refused_by_name(writable_nano, rewrite):
    lost = f"{_L}1.block_sparse_moe.experts.31.w2.weight_scale"
    rewrite(writable_nano, lambda name, dtype, array: None if name == lost else (dtype, array))
    with pytest.raises(SchemaError, match=re.escape(lost)):
        plan_gguf(open_checkpoint(writable_nano))


@pytest.mark.parametrize("stored", ["dtype", "shape"])
def test_tensor_stored_otherwise_is_refused(writable_nano, rewrite, stored):
    wrong = f"{_L}0.mlp.up_proj.weight"

    def edit(name, dtype, array):
        if name != wrong:
            return dtype, array
        return ("U8", array.view(np.uint8)) if stored == "dtype" else (dtype, array.T.copy())

    rewrite(writable_nano, edit)
    with pytest.raises(SchemaError, match=f"{re.escape(wrong)}: expected F32 or BF16 or F16"):
        plan_gguf(open_checkpoint(writable_nano))


def test_missing_situ_beta_is_refused_by_name(writable_nano):
    path = writable_nano / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["activation_situ_beta"]
    path.write_text(json.dumps(config))
    with pytest.raises(SchemaError, match=r"text_config\.activation_situ_beta"):
        plan_gguf(open_checkpoint(writable_nano))


@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_tokenizer_is_refused(writable_nano, file):
    (writable_nano / file).unlink()
    with pytest.raises(IncompleteError, match=file):
        plan_gguf(open_checkpoint(writable_nano))


def test_tokenizer_is_read_from_any_source(nano, checkpoint):
    class Elsewhere:
        def __init__(self):
            self._folder = LocalFolder(nano)
            self.files, self.label = dict(self._folder.files), "elsewhere"
            self.read, self.read_into = self._folder.read, self._folder.read_into

    place = Elsewhere()
    assert (
        plan_gguf(open_checkpoint(place)).files[0].header == plan_gguf(checkpoint).files[0].header
    )
    remote = open_checkpoint(place)
    del place.files["tiktoken.model"]
    with pytest.raises(IncompleteError, match=r"elsewhere: expected tiktoken.model, got none"):
        plan_gguf(remote)


def test_nan_scale_is_refused_because_readers_take_it_for_a_number(
    writable_nano, rewrite, export, tmp_path
):
    wrong = f"{_L}2.block_sparse_moe.experts.7.w3.weight_scale"

    def edit(name, dtype, array):
        if name == wrong:
            array = array.copy()
            array[1, 1] = 255
        return dtype, array

    rewrite(writable_nano, edit)
    plan = plan_gguf(open_checkpoint(writable_nano))
    with pytest.raises(ValuesError, match=r"experts.7.w3: .* got 255 \(NaN\) in 1 blocks"):
        export(writable_nano, plan, tmp_path / "out")


def test_padding_of_a_log_is_cut_only_where_it_is_zero(writable_nano, rewrite, export, tmp_path):
    def edit(name, dtype, array):
        if name.endswith("layers.0.self_attn.A_log"):
            array = array.copy()
            array[-1] = 0.5
        return dtype, array

    rewrite(writable_nano, edit)
    plan = plan_gguf(open_checkpoint(writable_nano))
    with pytest.raises(ValuesError, match=r"layers\.0\.self_attn\.A_log: expected zeros beyond"):
        export(writable_nano, plan, tmp_path / "out")


def test_a_log_that_was_cut_before_gives_the_same_decay(
    writable_nano, rewrite, export, tmp_path, exported
):
    def edit(name, dtype, array):
        return dtype, array[:4].copy() if name.endswith(".A_log") else array

    rewrite(writable_nano, edit)
    export(writable_nano, plan_gguf(open_checkpoint(writable_nano)), tmp_path / "out")
    found = _Reader(tmp_path / "out" / "model.gguf").array("blk.2.ssm_a", np.float32)
    assert np.array_equal(found, exported[0].array("blk.2.ssm_a", np.float32))


@pytest.mark.parametrize(("float_type", "number"), [("F32", 0), ("F16", 1), ("Q8_0", 8)])
def test_other_types_of_matrices(nano, checkpoint, source, export, tmp_path, float_type, number):
    proof = export(nano, plan_gguf(checkpoint, float_type=float_type), tmp_path / "out")
    reader = _Reader(tmp_path / "out" / "model.gguf")
    assert reader.fields["general.file_type"] == 38
    assert {reader.types[name] for name in ("output.weight", "blk.3.attn_k_b.weight")} == {number}
    assert reader.types["blk.1.ffn_gate_exps.weight"] == 39
    assert reader.types["blk.1.ffn_gate_inp.weight"] == 0
    head = _widen(source["language_model.lm_head.weight"])
    record = proof["weights"]["language_model.lm_head"]
    assert (record["source"], record["target"]) == ("BF16", float_type)
    if float_type == "F32":
        assert record["exact"]
        assert np.array_equal(reader.array("output.weight", np.float32), head)
    elif float_type == "F16":
        found = reader.array("output.weight", np.float16)
        assert np.array_equal(found, head.astype(np.float16))
        moved = np.abs(found.astype(np.float64) - head)
        assert record.get("max_abs", 0.0) == moved.max()
    else:
        blocks = reader.blocks("output.weight", 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        found = (blocks[..., 2:].view(np.int8) * scale).reshape(head.shape)
        assert not record["exact"]
        assert record["max_abs"] == np.abs(found.astype(np.float64) - head).max()
        assert record["sqnr_db"] > 40


def test_value_beyond_float16_is_refused(writable_nano, rewrite, export, tmp_path):
    def edit(name, dtype, array):
        if name.endswith("lm_head.weight"):
            array = array.copy()
            array[7, 7] = 0x4780  # 65536 in bfloat16
        return dtype, array

    rewrite(writable_nano, edit)
    plan = plan_gguf(open_checkpoint(writable_nano), float_type="F16")
    with pytest.raises(
        ValuesError, match=r"lm_head\.weight: .* F16 holds, got a magnitude of 65536"
    ):
        export(writable_nano, plan, tmp_path / "out")


def test_float32_source_is_narrowed_and_measured(writable_nano, rewrite, export, tmp_path):
    wide = "language_model.lm_head.weight"
    values = np.random.default_rng(5).normal(size=(2304, 128)).astype(np.float32)
    rewrite(
        writable_nano,
        lambda name, dtype, array: ("F32", values) if name == wide else (dtype, array),
    )
    proof = export(writable_nano, plan_gguf(open_checkpoint(writable_nano)), tmp_path / "out")
    found = _widen(_Reader(tmp_path / "out" / "model.gguf").array("output.weight", np.uint16))
    record = proof["weights"]["language_model.lm_head"]
    assert (record["source"], record["target"], record["exact"]) == ("F32", "BF16", False)
    assert record["max_abs"] == np.abs(found.astype(np.float64) - values).max()


def test_experts_that_are_floats_take_the_float_type(
    writable_nano, rewrite, export, tmp_path, read_tensors
):
    generator = np.random.default_rng(7)
    packed = read_tensors(writable_nano)
    floats = {
        name.replace("weight_packed", "weight"): (
            "BF16",
            generator.integers(0, 0x4000, (array.shape[0], array.shape[1] * 2), np.uint16),
        )
        for name, array in packed.items()
        if name.endswith("weight_packed")
    }
    drop = ("weight_packed", "weight_scale")
    rewrite(writable_nano, lambda n, d, a: None if n.endswith(drop) else (d, a), floats)
    export(writable_nano, plan_gguf(open_checkpoint(writable_nano)), tmp_path / "out")
    reader = _Reader(tmp_path / "out" / "model.gguf")
    assert reader.fields["general.file_type"] == 32
    found = reader.array("blk.4.ffn_down_exps.weight", np.uint16)
    assert found.shape == (32, 64, 96)
    for expert in (0, 31):
        name = f"{_L}4.block_sparse_moe.experts.{expert}.w2.weight"
        assert np.array_equal(found[expert], floats[name][1])


def test_split_model_has_the_parts_its_first_file_announces(
    nano, checkpoint, export, exported, tmp_path
):
    limit = 2_600_000
    plan = plan_gguf(checkpoint, max_file_bytes=limit, stem="nano")
    out = tmp_path / "out"
    export(nano, plan, out)
    names = sorted(path.name for path in out.glob("*.gguf"))
    assert names == [f"nano-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    whole, parts = exported[0], [_Reader(out / name) for name in names]
    assert all(part.size <= limit for part in parts)
    split = [{k: v for k, v in p.fields.items() if k.startswith("split.")} for p in parts]
    assert split == [
        {"split.no": i, "split.count": 3, "split.tensors.count": 242} for i in range(3)
    ]
    assert set(parts[0].fields) - set(split[0]) == set(whole.fields)
    assert [len(part.fields) for part in parts[1:]] == [3, 3]
    merged = {name: part for part in parts for name in part.types}
    assert set(merged) == set(whole.types)
    for name, part in merged.items():
        assert part.types[name] == whole.types[name]
        assert part.shapes[name] == whole.shapes[name]
    name = "blk.8.ffn_up_exps.weight"
    assert np.array_equal(merged[name].blocks(name, 17), whole.blocks(name, 17))


def test_both_halves_of_a_split_projection_lie_in_one_part(checkpoint):
    files = plan_gguf(checkpoint, max_file_bytes=1).files
    for file in files:
        k = {name.replace("attn_k_b", "attn_v_b") for name in file.places if "attn_k_b" in name}
        assert k <= set(file.places)
    assert len(files) == 242 - 3


@pytest.mark.parametrize(
    "stem",
    [
        "x-00001-of-00013.gguf", "x-00001-of-00013", "x.gguf", "", ".", "..", "a/b", "../x", "a\\b",
    ],
)  # fmt: skip
def test_stem_that_is_no_plain_name_is_refused(checkpoint, stem):
    with pytest.raises(UsageError, match="stem: expected a ") as caught:
        plan_gguf(checkpoint, stem=stem)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("stem", ["x-00001-of-13", "K3-of-2026", "x.gguf.old"])
def test_stem_that_only_looks_alike_is_taken(checkpoint, stem):
    assert plan_gguf(checkpoint, stem=stem).files[0].name == f"{stem}.gguf"


@pytest.mark.parametrize("float_type", ["bf16", "Q4_0", "MXFP4", ""])
def test_unknown_type_is_refused(checkpoint, float_type):
    with pytest.raises(UsageError, match="float type: expected F32 or F16 or BF16 or Q8_0"):
        plan_gguf(checkpoint, float_type=float_type)


def test_forecast_sums_to_the_file(checkpoint):
    plan = plan_gguf(checkpoint)
    [file] = plan.files
    assert sum(f.target_bytes for f in plan.forecasts) == sum(
        end - begin for begin, end in file.places.values()
    )
    experts = [f for f in plan.forecasts if f.target == "MXFP4"]
    assert [(f.family, f.tensors) for f in experts] == [("routed experts", 8 * 32 * 3)]


@pytest.fixture(scope="module")
def released(released_checkpoint):
    """Plan the release in parts of 50 GB."""
    return plan_gguf(released_checkpoint, max_file_bytes=50_000_000_000)


def test_release_has_its_2573_tensors_in_parts_of_the_size(released):
    assert sum(len(file.places) for file in released.files) == 2573
    assert max(file.file_bytes for file in released.files) <= 50_000_000_000
    assert released.files[0].name == f"model-00001-of-{len(released.files):05d}.gguf"


def test_release_fits_between_its_experts_and_its_shards(released):
    total = sum(file.file_bytes for file in released.files)
    experts = 92 * 896 * 3 * 3072 * 3584 // 32 * 17
    assert experts < total < 1_562_000_000_000


def test_more_experts_than_old_runtimes_hold_are_written_with_a_note(released):
    key = b"kimi-k3.expert_count" + struct.pack("<II", 4, 896)
    assert key in released.files[0].header
    assert "896 experts need llama.cpp with LLAMA_MAX_EXPERTS" in released.transforms["runtime"]


def test_few_experts_need_no_note(checkpoint):
    assert "runtime" not in plan_gguf(checkpoint).transforms


def test_tiny_oracle_checkpoint_exports(oracle, export, tmp_path):
    source = Path(shutil.copytree(oracle, tmp_path / "oracle"))
    export(source, plan_gguf(open_checkpoint(source)), tmp_path / "out")
    reader = _Reader(tmp_path / "out" / "model.gguf")
    config = read_config(json.loads((source / "config.json").read_text()))
    assert reader.fields["kimi-k3.block_count"] == config.num_hidden_layers
    assert len(reader.fields["tokenizer.ggml.tokens"]) == config.vocab_size
