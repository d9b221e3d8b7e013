"""Kimi-K3's tensors as llama.cpp's architecture `kimi-k3` names, types and shapes them.

A name follows from a tensor's role: `g_proj` is two different tensors, and only the layer's kind
tells them apart.

Source: ggml-org/llama.cpp, `src/llama-arch.cpp` and `src/models/kimi-k3.cpp`.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import Unit
from k3quant.errors import RefusedError
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import TensorSpec
from k3quant.schemes.bundles import Bundle, OutputTensor, source_bytes, text_layers, weight_name
from k3quant.schemes.float_units import FloatUnit, SplitHeadsUnit
from k3quant.schemes.gguf_file import TensorInfo
from k3quant.schemes.gguf_units import BlocksUnit, DecayUnit, ResidualScoreUnit

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "token_embd.weight",
        "lm_head": "output.weight",
        "norm": "output_norm.weight",
        "input_layernorm": "attn_norm.weight",
        "post_attention_layernorm": "ffn_norm.weight",
        "kda.q_proj": "attn_q.weight",
        "kda.k_proj": "attn_k.weight",
        "kda.v_proj": "attn_v.weight",
        "kda.q_conv1d": "ssm_conv1d_q.weight",
        "kda.k_conv1d": "ssm_conv1d_k.weight",
        "kda.v_conv1d": "ssm_conv1d_v.weight",
        "kda.f_a_proj": "ssm_f_a.weight",
        "kda.f_b_proj": "ssm_f_b.weight",
        "kda.b_proj": "ssm_beta.weight",
        "kda.g_proj": "ssm_g.weight",
        "kda.dt_bias": "ssm_dt.bias",
        "kda.A_log": "ssm_a",
        "kda.o_norm": "ssm_norm.weight",
        "kda.o_proj": "attn_output.weight",
        "mla.q_proj": "attn_q.weight",
        "mla.q_a_proj": "attn_q_a.weight",
        "mla.q_a_layernorm": "attn_q_a_norm.weight",
        "mla.q_b_proj": "attn_q_b.weight",
        "mla.kv_a_proj_with_mqa": "attn_kv_a_mqa.weight",
        "mla.kv_a_layernorm": "attn_kv_a_norm.weight",
        "mla.g_proj": "attn_gate.weight",
        "mla.o_proj": "attn_output.weight",
        "mlp.gate_proj": "ffn_gate.weight",
        "mlp.up_proj": "ffn_up.weight",
        "mlp.down_proj": "ffn_down.weight",
        "moe.gate": "ffn_gate_inp.weight",
        "moe.bias": "exp_probs_b.bias",
        "moe.latent_down": "ffn_routed_down.weight",
        "moe.latent_up": "ffn_routed_up.weight",
        "moe.latent_norm": "ffn_routed_norm.weight",
        "moe.shared.gate_proj": "ffn_gate_shexp.weight",
        "moe.shared.up_proj": "ffn_up_shexp.weight",
        "moe.shared.down_proj": "ffn_down_shexp.weight",
        "expert.w1": "ffn_gate_exps.weight",
        "expert.w2": "ffn_down_exps.weight",
        "expert.w3": "ffn_up_exps.weight",
    }
)
"""Target name by role; a layer's tensors stand under `blk.<layer>.`."""

# Three pairs are folded into one vector each, and one matrix becomes two.
_SCORES = {
    "self_attention_res": "attn_res_score.weight",
    "mlp_res": "ffn_res_score.weight",
    "output_attn_res": "output_res_score.weight",
}
_SPLIT = "mla.kv_b_proj"
_SPLIT_NAMES = ("attn_k_b.weight", "attn_v_b.weight")

_ALWAYS_F32 = frozenset({"moe.gate", "kda.q_conv1d", "kda.k_conv1d", "kda.v_conv1d"})

TRANSFORMS: Mapping[str, str] = MappingProxyType(
    {
        "ssm_a": "-exp(A_log) of the heads, computed in float64 and rounded once; padding left out",
        "res_score": "residual norm x projection, elementwise, float32",
        "attn_k_b, attn_v_b": "kv_b_proj split by heads; k's part transposed",
        "ssm_conv1d": "[channels, 1, taps] reshaped to [1, channels, 1, taps]; bytes unchanged",
        "ffn_*_exps": "experts stacked; MXFP4 scale byte before its codes, element j beside j + 16",
    }
)
"""What the target changes besides names, for the proof."""


def target_name(spec: TensorSpec) -> str:
    """Return the target name of a tensor that keeps its identity.

    Raises:
        RefusedError: The architecture has no such tensor.
    """
    suffix = NAMES.get(spec.role)
    if suffix is None:
        raise RefusedError(
            f"tensor {spec.name}: expected a role of architecture `kimi-k3`, got {spec.role}"
        )
    return _in_layer(spec, suffix)


def stored_type(name: str, role: str, shape: tuple[int, ...], float_type: str) -> str:
    """Return the type of a float tensor: vectors, norms, router and convolutions stay F32."""
    plain = name.endswith(".weight") and not name.endswith("_norm.weight")
    if len(shape) <= 1 or not plain or role in _ALWAYS_F32:
        return "F32"
    return float_type


def plan_bundles(
    config: K3Config, checkpoint: Checkpoint, *, packed: bool, float_type: str
) -> Iterator[Bundle]:
    """Yield what fills the target's tensors: globals first, then layer by layer.

    Args:
        config: The model.
        checkpoint: The source.
        packed: Whether routed experts are MXFP4 pairs.
        float_type: Type of matrices outside the routed experts, or of all when those are floats.

    Raises:
        SchemaError: A source tensor is missing or not as the table has it, or a matrix has no
            whole blocks of the type.
        RefusedError: The architecture has no such tensor.
    """
    for layer in text_layers(config, checkpoint, packed=packed):
        for role, specs in layer.items():
            if role.endswith(("_res_norm", ".scale")):
                continue  # goes with its partner
            if role.endswith("_res_proj"):
                [norm], [proj] = layer[role.removesuffix("proj") + "norm"], specs
                yield _score(norm, proj, checkpoint)
            elif role.endswith(".packed"):
                scales = layer[role.removesuffix("packed") + "scale"]
                yield _stacked_blocks(specs, scales, checkpoint)
            elif role.startswith("expert."):
                yield _stacked_floats(specs, checkpoint, float_type)
            elif role == _SPLIT:
                yield _split_heads(specs[0], config, checkpoint, float_type)
            elif role == "kda.A_log":
                yield _decay(specs[0], config, checkpoint)
            else:
                yield _float(specs[0], checkpoint, float_type)


def _in_layer(spec: TensorSpec, suffix: str) -> str:
    return suffix if spec.layer is None else f"blk.{spec.layer}.{suffix}"


def _output(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name, dtype, shape, TensorInfo(name, dtype, shape).num_bytes)


def _bundle(
    spec: TensorSpec, checkpoint: Checkpoint, tensors: tuple[OutputTensor, ...], *units: Unit
) -> Bundle:
    return Bundle(
        tensors=tensors,
        units=units,
        family=spec.family,
        weights=len(units),
        source_bytes=source_bytes(checkpoint, (name for unit in units for name in unit.sources)),
        target=tensors[0].dtype,
    )


def _float(spec: TensorSpec, checkpoint: Checkpoint, float_type: str) -> Bundle:
    name, shape = target_name(spec), checkpoint.entry(spec.name).shape
    if spec.role.endswith("_conv1d"):
        channels, one, taps = shape
        shape = (1, channels, one, taps)
    dtype = stored_type(name, spec.role, shape, float_type)
    unit = FloatUnit(
        source=spec.name,
        module=weight_name(spec),
        family=spec.family,
        source_dtype=checkpoint.entry(spec.name).dtype,
        target=name,
        target_dtype=dtype,
    )
    return _bundle(spec, checkpoint, (_output(name, dtype, shape),), unit)


def _score(norm: TensorSpec, proj: TensorSpec, checkpoint: Checkpoint) -> Bundle:
    name = _in_layer(proj, _SCORES[proj.role.removesuffix("_proj")])
    unit = ResidualScoreUnit(
        norm=norm.name,
        proj=proj.name,
        modules=(weight_name(norm), weight_name(proj)),
        family=proj.family,
        target=name,
    )
    return _bundle(proj, checkpoint, (_output(name, "F32", norm.shape),), unit)


def _decay(spec: TensorSpec, config: K3Config, checkpoint: Checkpoint) -> Bundle:
    name, heads = target_name(spec), config.mla.num_heads
    unit = DecayUnit(source=spec.name, family=spec.family, target=name, heads=heads)
    return _bundle(spec, checkpoint, (_output(name, "F32", (heads,)),), unit)


def _split_heads(
    spec: TensorSpec, config: K3Config, checkpoint: Checkpoint, float_type: str
) -> Bundle:
    mla = config.mla
    k_name, v_name = (_in_layer(spec, suffix) for suffix in _SPLIT_NAMES)
    unit = SplitHeadsUnit(
        source=spec.name,
        module=weight_name(spec),
        family=spec.family,
        source_dtype=checkpoint.entry(spec.name).dtype,
        target_dtype=float_type,
        k_target=k_name,
        v_target=v_name,
        heads=mla.num_heads,
        nope=mla.qk_nope_head_dim,
    )
    k_shape = (mla.num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim)
    v_shape = (mla.num_heads, mla.v_head_dim, mla.kv_lora_rank)
    outputs = (_output(k_name, float_type, k_shape), _output(v_name, float_type, v_shape))
    return _bundle(spec, checkpoint, outputs, unit)


def _stacked_blocks(
    packed: list[TensorSpec], scales: list[TensorSpec], checkpoint: Checkpoint
) -> Bundle:
    first = packed[0]
    name = target_name(first)
    rows, pairs = first.shape
    output = _output(name, "MXFP4", (len(packed), rows, pairs * 2))
    each = output.num_bytes // len(packed)
    units = (
        BlocksUnit(
            module=codes.module,
            family=codes.family,
            packed=codes.name,
            scale=scale.name,
            target=name,
            offset=place * each,
        )
        for place, (codes, scale) in enumerate(zip(packed, scales, strict=True))
    )
    return _bundle(first, checkpoint, (output,), *units)


def _stacked_floats(specs: list[TensorSpec], checkpoint: Checkpoint, float_type: str) -> Bundle:
    first = specs[0]
    name = target_name(first)
    output = _output(name, float_type, (len(specs), *first.shape))
    each = output.num_bytes // len(specs)
    units = (
        FloatUnit(
            source=spec.name,
            module=weight_name(spec),
            family=spec.family,
            source_dtype=checkpoint.entry(spec.name).dtype,
            target=name,
            target_dtype=float_type,
            offset=place * each,
        )
        for place, spec in enumerate(specs)
    )
    return _bundle(first, checkpoint, (output,), *units)
