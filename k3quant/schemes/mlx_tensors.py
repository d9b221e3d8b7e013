"""Kimi-K3's tensors as mlx-lm's `kimi_k3` holds them once loaded: fused, stacked, split.

MLX's mxfp4 word is eight codes, the first in its lowest bits: the released bytes, viewed as
little-endian uint32. Example: bytes `10 32 54 76` are the word 0x76543210.

Source: ml-explore/mlx-lm, `mlx_lm/models/kimi_k3.py`, `sanitize`.
"""

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import Unit
from k3quant.errors import RefusedError
from k3quant.formats.dtypes import DTYPES
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import TensorSpec
from k3quant.schemes.bundles import Bundle, OutputTensor, source_bytes, text_layers, weight_name
from k3quant.schemes.float_units import FloatUnit, SplitHeadsUnit
from k3quant.schemes.mlx_units import CutUnit, StackUnit

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "norm": "model.norm.weight",
        "output_attn_res_norm": "model.output_attn_res_norm.weight",
        "output_attn_res_proj": "model.output_attn_res_proj.weight",
        "input_layernorm": "input_layernorm.weight",
        "post_attention_layernorm": "post_attention_layernorm.weight",
        "self_attention_res_norm": "self_attention_res_norm.weight",
        "self_attention_res_proj": "self_attention_res_proj.weight",
        "mlp_res_norm": "mlp_res_norm.weight",
        "mlp_res_proj": "mlp_res_proj.weight",
        "kda.f_a_proj": "self_attn.f_a_proj.weight",
        "kda.f_b_proj": "self_attn.f_b_proj.weight",
        "kda.b_proj": "self_attn.b_proj.weight",
        "kda.g_proj": "self_attn.g_proj.weight",
        "kda.g_a_proj": "self_attn.g_a_proj.weight",
        "kda.g_b_proj": "self_attn.g_b_proj.weight",
        "kda.o_proj": "self_attn.o_proj.weight",
        "kda.dt_bias": "self_attn.dt_bias",
        "kda.A_log": "self_attn.A_log",
        "kda.o_norm": "self_attn.o_norm.weight",
        "mla.q_proj": "self_attn.q_proj.weight",
        "mla.q_a_proj": "self_attn.q_a_proj.weight",
        "mla.q_a_layernorm": "self_attn.q_a_layernorm.weight",
        "mla.q_b_proj": "self_attn.q_b_proj.weight",
        "mla.kv_a_proj_with_mqa": "self_attn.kv_a_proj_with_mqa.weight",
        "mla.kv_a_layernorm": "self_attn.kv_a_layernorm.weight",
        "mla.g_proj": "self_attn.g_proj.weight",
        "mla.o_proj": "self_attn.o_proj.weight",
        "mlp.gate_proj": "mlp.gate_proj.weight",
        "mlp.up_proj": "mlp.up_proj.weight",
        "mlp.down_proj": "mlp.down_proj.weight",
        "moe.gate": "mlp.gate.weight",
        "moe.bias": "mlp.e_score_correction_bias",
        "moe.latent_down": "mlp.routed_expert_down_proj.weight",
        "moe.latent_up": "mlp.routed_expert_up_proj.weight",
        "moe.latent_norm": "mlp.routed_expert_norm.weight",
        "moe.shared.gate_proj": "mlp.shared_experts.gate_proj.weight",
        "moe.shared.up_proj": "mlp.shared_experts.up_proj.weight",
        "moe.shared.down_proj": "mlp.shared_experts.down_proj.weight",
        "expert.w1": "mlp.switch_mlp.gate_proj.weight",
        "expert.w2": "mlp.switch_mlp.down_proj.weight",
        "expert.w3": "mlp.switch_mlp.up_proj.weight",
    }
)
"""Target name by role, below `language_model.` and, in a layer, `model.layers.<layer>.`."""

_FUSED = {
    ("kda.q_proj", "kda.k_proj", "kda.v_proj"): "self_attn.qkv_proj.weight",
    ("kda.q_conv1d", "kda.k_conv1d", "kda.v_conv1d"): "self_attn.qkv_conv.conv.weight",
}
_FUSED_ROLES = frozenset(role for roles in _FUSED for role in roles)
_SPLIT = "mla.kv_b_proj"
_SPLIT_NAMES = ("self_attn.embed_q.weight", "self_attn.unembed_out.weight")

TRANSFORMS: Mapping[str, str] = MappingProxyType(
    {
        "A_log": "cut to the heads; still a logarithm",
        "qkv_proj, qkv_conv": "rows of q, k and v joined; taps of a channel before its one input",
        "embed_q, unembed_out": "kv_b_proj split by heads; k's part transposed",
        "switch_mlp": "experts stacked; MXFP4 bytes unchanged, codes viewed as uint32",
    }
)
"""What the target changes besides names, for the proof."""


def target_name(spec: TensorSpec) -> str:
    """Return the target name of a tensor that keeps its identity.

    Raises:
        RefusedError: The target has no such tensor.
    """
    suffix = NAMES.get(spec.role)
    if suffix is None:
        raise RefusedError(
            f"tensor {spec.name}: expected a role of mlx-lm's `kimi_k3`, got {spec.role}"
        )
    return _in_layer(spec, suffix)


def plan_bundles(config: K3Config, checkpoint: Checkpoint, *, packed: bool) -> Iterator[Bundle]:
    """Yield what fills the target's tensors: globals first, then layer by layer.

    Args:
        config: The model.
        checkpoint: The source.
        packed: Whether routed experts are MXFP4 pairs.

    Raises:
        SchemaError: A source tensor is missing or not as the table has it.
        RefusedError: The target has no such tensor, or parts that it fuses differ in type.
    """
    for layer in text_layers(config, checkpoint, packed=packed):
        # Stacks of codes nearly fill a file each; scale bytes share one with what follows.
        for role, specs in sorted(layer.items(), key=lambda item: not item[0].endswith(".packed")):
            if role in _FUSED_ROLES:
                continue
            if role.endswith((".packed", ".scale")):
                yield _stacked_bytes(specs, checkpoint)
            elif role.startswith("expert."):
                yield _stacked_floats(specs, checkpoint)
            elif role == _SPLIT:
                yield _split_heads(specs[0], config, checkpoint)
            elif role == "kda.A_log":
                yield _cut(specs[0], config, checkpoint)
            else:
                yield _float(specs[0], checkpoint)
        for roles, suffix in _FUSED.items():
            if roles[0] in layer:
                parts = [layer[role][0] for role in roles]
                yield _joined(parts, _in_layer(parts[0], suffix), checkpoint)


def _in_layer(spec: TensorSpec, suffix: str) -> str:
    layer = "" if spec.layer is None else f"model.layers.{spec.layer}."
    return f"language_model.{layer}{suffix}"


def _output(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name, dtype, shape, DTYPES[dtype].byte_count(prod(shape)))


def _bundle(
    spec: TensorSpec, checkpoint: Checkpoint, tensors: tuple[OutputTensor, ...], *units: Unit
) -> Bundle:
    return Bundle(
        tensors=tensors,
        units=units,
        family=spec.family,
        weights=0 if spec.part == "scale" else len(units),
        source_bytes=source_bytes(checkpoint, (name for unit in units for name in unit.sources)),
        target=tensors[0].dtype if spec.part == "weight" else "mxfp4",
    )


def _float_unit(spec: TensorSpec, dtype: str, target: str, *, offset: int = 0) -> FloatUnit:
    return FloatUnit(
        source=spec.name,
        module=weight_name(spec),
        family=spec.family,
        source_dtype=dtype,
        target=target,
        target_dtype=dtype,
        offset=offset,
    )


def _float(spec: TensorSpec, checkpoint: Checkpoint) -> Bundle:
    name, entry = target_name(spec), checkpoint.entry(spec.name)
    output = _output(name, entry.dtype, entry.shape)
    return _bundle(spec, checkpoint, (output,), _float_unit(spec, entry.dtype, name))


def _joined(parts: list[TensorSpec], name: str, checkpoint: Checkpoint) -> Bundle:
    """Join parts by rows; a convolution's [channels, 1, taps] becomes [channels, taps, 1]."""
    dtype = _one_dtype(parts, name, checkpoint)
    rows = [checkpoint.entry(part.name).shape[0] for part in parts]
    row = checkpoint.entry(parts[0].name).shape[1:]
    output = _output(name, dtype, (sum(rows), *reversed(row)))
    row_bytes = output.num_bytes // sum(rows)
    units = (
        _float_unit(part, dtype, name, offset=sum(rows[:place]) * row_bytes)
        for place, part in enumerate(parts)
    )
    return _bundle(parts[0], checkpoint, (output,), *units)


def _split_heads(spec: TensorSpec, config: K3Config, checkpoint: Checkpoint) -> Bundle:
    mla, dtype = config.mla, checkpoint.entry(spec.name).dtype
    k_name, v_name = (_in_layer(spec, suffix) for suffix in _SPLIT_NAMES)
    unit = SplitHeadsUnit(
        source=spec.name,
        module=weight_name(spec),
        family=spec.family,
        source_dtype=dtype,
        target_dtype=dtype,
        k_target=k_name,
        v_target=v_name,
        heads=mla.num_heads,
        nope=mla.qk_nope_head_dim,
    )
    k_shape = (mla.num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim)
    v_shape = (mla.num_heads, mla.v_head_dim, mla.kv_lora_rank)
    outputs = (_output(k_name, dtype, k_shape), _output(v_name, dtype, v_shape))
    return _bundle(spec, checkpoint, outputs, unit)


def _cut(spec: TensorSpec, config: K3Config, checkpoint: Checkpoint) -> Bundle:
    name, heads = target_name(spec), config.kda.num_heads
    output = _output(name, checkpoint.entry(spec.name).dtype, (heads,))
    unit = CutUnit(source=spec.name, family=spec.family, target=name, heads=heads)
    return _bundle(spec, checkpoint, (output,), unit)


def _stacked_bytes(specs: list[TensorSpec], checkpoint: Checkpoint) -> Bundle:
    # Codes and scale bytes are separate, so that a stack of 896 experts stays below 5 GB.
    first = specs[0]
    rows, width = first.shape
    name = target_name(first)
    if first.part == "packed":
        output = _output(name, "U32", (len(specs), rows, width // 4))
    else:
        name = name.removesuffix("weight") + "scales"
        output = _output(name, "U8", (len(specs), rows, width))
    each = output.num_bytes // len(specs)
    units = (
        StackUnit(
            source=spec.name,
            module=spec.module if spec.part == "packed" else None,
            family=spec.family,
            target=name,
            offset=place * each,
        )
        for place, spec in enumerate(specs)
    )
    return _bundle(first, checkpoint, (output,), *units)


def _stacked_floats(specs: list[TensorSpec], checkpoint: Checkpoint) -> Bundle:
    name = target_name(specs[0])
    dtype = _one_dtype(specs, name, checkpoint)
    output = _output(name, dtype, (len(specs), *specs[0].shape))
    each = output.num_bytes // len(specs)
    units = (
        _float_unit(spec, dtype, name, offset=place * each) for place, spec in enumerate(specs)
    )
    return _bundle(specs[0], checkpoint, (output,), *units)


def _one_dtype(specs: list[TensorSpec], name: str, checkpoint: Checkpoint) -> str:
    dtypes = sorted({checkpoint.entry(spec.name).dtype for spec in specs})
    if len(dtypes) > 1:
        raise RefusedError(f"tensor {name}: expected parts of one type, got {', '.join(dtypes)}")
    return dtypes[0]
