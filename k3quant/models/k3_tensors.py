"""The table: every tensor that a config implies.

Everything that needs a tensor's name, shape, dtype or place derives it from here. A `role` names
what a tensor does (`kda.q_proj`, `expert.w1`) in every spelling of the checkpoint; `family` groups
roles for counting. Shard numbers are those of the released layout: one file a decoder layer, then
the globals, then the projector, then the vision tower.
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from k3quant.errors import SchemaError
from k3quant.models.k3_config import K3Config, KdaConfig, LayerKind, MlaConfig, VisionConfig

MX_BLOCK_SIZE = 32


class Family(StrEnum):
    """Groups of tensors, as reports count them."""

    ROUTED_EXPERTS = "routed experts"
    KDA = "KDA attention"
    MLA = "MLA attention"
    SHARED_EXPERTS = "shared experts"
    LATENT = "latent projections"
    ROUTER = "router"
    DENSE_MLP = "dense MLP"
    NORMS = "norms and residual mixes"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    PROJECTOR = "projector"
    VISION = "vision tower"


class TensorSpec(NamedTuple):
    """One tensor of the table.

    Attributes:
        name: Full name in the checkpoint.
        dtype: Safetensors dtype, such as `BF16`.
        shape: Stored shape.
        role: What it does, the same in every spelling.
        part: `weight` for a whole tensor, `packed` or `scale` for the halves of an MXFP4 one.
        family: The group it is counted in.
        layer: 0-based decoder layer or vision block, None for globals.
        expert: Routed expert, None elsewhere.
        shard: 1-based file of the released layout.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    part: str
    family: Family
    layer: int | None
    expert: int | None
    shard: int

    @property
    def module(self) -> str:
        """Name without its last component."""
        return self.name.rpartition(".")[0]


class _Row(NamedTuple):
    """A tensor before its prefix, layer and shard are known."""

    suffix: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    family: Family


def tensors(config: K3Config, *, packed: bool | None = None) -> Iterator[TensorSpec]:
    """Yield every tensor of a config, shard by shard, in no order within a shard.

    Args:
        config: The config.
        packed: Whether routed experts are MXFP4 pairs; None takes the config's word.
    """
    for shard in range(1, num_shards(config) + 1):
        yield from shard_tensors(config, shard, packed=packed)


def num_shards(config: K3Config) -> int:
    """Return the number of files of the released layout: layers, globals, then vision's two."""
    return config.num_hidden_layers + (3 if config.vision else 1)


def shard_name(config: K3Config, shard: int) -> str:
    """Return a file's name: five digits of six, as released."""
    return f"model-{shard:05d}-of-{num_shards(config):06d}.safetensors"


def shard_content(config: K3Config, shard: int) -> str:
    """Return what a file of the released layout holds, for people."""
    layer = shard - 1
    if layer < config.num_hidden_layers:
        kind = config.layer_kinds[layer].upper()
        return f"layer {layer} ({kind}, {'MoE' if config.is_moe(layer) else 'dense MLP'})"
    return ("embed, lm_head, final norms", "mm_projector", "vision_tower")[
        layer - config.num_hidden_layers
    ]


def shard_tensors(config: K3Config, shard: int, *, packed: bool | None = None) -> list[TensorSpec]:
    """Return the tensors of one file of the released layout.

    Args:
        config: The config.
        shard: 1-based number of the file.
        packed: Whether routed experts are MXFP4 pairs; None takes the config's word.

    Raises:
        ValueError: There is no such shard.
    """
    layer = shard - 1
    beyond = layer - config.num_hidden_layers
    if not 0 < shard <= num_shards(config):
        raise ValueError(f"shard {shard}: expected 1 to {num_shards(config)}")
    if beyond < 0:
        packed = config.packed_experts if packed is None else packed
        return layer_tensors(config, layer, packed=packed)
    if beyond == 0:
        return [_spec(row, "", None, shard) for row in _global_rows(config)]
    assert config.vision is not None
    if beyond == 1:
        return [_spec(row, "mm_projector.", None, shard) for row in _projector_rows(config)]
    return _vision_tensors(config.vision, shard)


def layer_tensors(config: K3Config, layer: int, *, packed: bool) -> list[TensorSpec]:
    """Return the tensors of one decoder layer (0-based).

    Args:
        config: The config.
        layer: The layer.
        packed: Whether routed experts are MXFP4 pairs.

    Raises:
        SchemaError: Packed experts whose width is no multiple of 32.
    """
    prefix = f"{_decoder(config)}layers.{layer}."
    shard = layer + 1
    if config.layer_kinds[layer] is LayerKind.KDA:
        attention = _kda_rows(config.kda, config.hidden_size)
    else:
        attention = _mla_rows(config.mla, config.hidden_size)
    rows = [*_layer_norm_rows(config), *attention]
    if not config.is_moe(layer):
        inner = config.intermediate_size
        rows += _mlp_rows("mlp.", "mlp.", config.hidden_size, inner, Family.DENSE_MLP)
        return [_spec(row, prefix, layer, shard) for row in rows]
    rows += _moe_rows(config)
    specs = [_spec(row, prefix, layer, shard) for row in rows]
    return specs + _expert_tensors(config, prefix, layer, shard, packed=packed)


def accepted_shapes(config: K3Config, spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
    """Return the shapes under which a tensor is known to be stored, the released one first.

    `A_log` is zero-padded to `head_dim` in the release, cut to the heads by some exporters, and
    [1, 1, heads, 1] in older Kimi-Linear files.
    """
    if spec.role != "kda.A_log":
        return (spec.shape,)
    heads = config.kda.num_heads
    return (spec.shape, (heads,), (1, 1, heads, 1))


def accepted_dtypes(config: K3Config, spec: TensorSpec) -> tuple[str, ...]:
    """Return the dtypes under which a tensor may be stored, the released one first.

    Flat Kimi-Linear checkpoints exist in bf16 throughout; a scale byte may be typed `F8_E8M0`.
    """
    if spec.part == "scale":
        return (spec.dtype, "F8_E8M0")
    if config.flat and spec.part == "weight":
        return tuple(dict.fromkeys((spec.dtype, "BF16", "F32", "F16")))
    return (spec.dtype,)


def _decoder(config: K3Config) -> str:
    return "model." if config.flat else "language_model.model."


def _spec(row: _Row, prefix: str, layer: int | None, shard: int) -> TensorSpec:
    return TensorSpec(
        prefix + row.suffix, row.dtype, row.shape, row.role, "weight", row.family, layer, None,
        shard,
    )  # fmt: skip


def _bf16(suffix: str, role: str, family: Family, *shape: int) -> _Row:
    return _Row(f"{suffix}.weight", role, "BF16", shape, family)


def _f32(suffix: str, role: str, family: Family, *shape: int) -> _Row:
    return _Row(suffix, role, "F32", shape, family)


def _layer_norm_rows(config: K3Config) -> list[_Row]:
    D = config.hidden_size
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.attn_res_block_size is None:
        return [_bf16(name, name, Family.NORMS, D) for name in names]
    names += ["self_attention_res_norm", "mlp_res_norm"]
    mixes = ("self_attention_res_proj", "mlp_res_proj")
    norms = [_bf16(name, name, Family.NORMS, D) for name in names]
    return norms + [_bf16(name, name, Family.NORMS, 1, D) for name in mixes]


def _kda_rows(kda: KdaConfig, D: int) -> list[_Row]:
    H, K, W = kda.num_heads, kda.head_dim, kda.width
    matrices = {
        "q_proj": (W, D), "k_proj": (W, D), "v_proj": (W, D), "o_proj": (D, W),
        "b_proj": (H, D), "f_a_proj": (K, D), "f_b_proj": (W, K),
    }  # fmt: skip
    if kda.use_full_rank_gate:
        matrices["g_proj"] = (W, D)
    else:
        matrices |= {"g_a_proj": (K, D), "g_b_proj": (W, K)}
    rows = [
        _bf16(f"self_attn.{name}", f"kda.{name}", Family.KDA, *shape)
        for name, shape in matrices.items()
    ]
    floats: dict[str, tuple[str, tuple[int, ...]]] = {
        "A_log": ("A_log", (max(H, K),)),  # padded to head_dim; only the first H count
        "dt_bias": ("dt_bias", (W,)),
        "o_norm": ("o_norm.weight", (K,)),
    }
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        floats[name] = (f"{name}.weight", (W, 1, kda.short_conv_kernel_size))
    return rows + [
        _f32(f"self_attn.{suffix}", f"kda.{name}", Family.KDA, *shape)
        for name, (suffix, shape) in floats.items()
    ]


def _mla_rows(mla: MlaConfig, D: int) -> list[_Row]:
    H, kv = mla.num_heads, mla.kv_lora_rank
    queries = H * mla.qk_head_dim
    matrices = {
        "kv_a_proj_with_mqa": (kv + mla.qk_rope_head_dim, D),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (H * (mla.qk_nope_head_dim + mla.v_head_dim), kv),
        "o_proj": (D, H * mla.v_head_dim),
    }
    if mla.q_lora_rank is None:
        matrices["q_proj"] = (queries, D)
    else:
        rank = mla.q_lora_rank
        matrices |= {"q_a_proj": (rank, D), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    if mla.mla_use_output_gate:
        matrices["g_proj"] = (H * mla.v_head_dim, D)
    return [
        _bf16(f"self_attn.{name}", f"mla.{name}", Family.MLA, *shape)
        for name, shape in matrices.items()
    ]


def _mlp_rows(prefix: str, role: str, D: int, inner: int, family: Family) -> list[_Row]:
    shapes = {"gate_proj": (inner, D), "up_proj": (inner, D), "down_proj": (D, inner)}
    return [_bf16(prefix + name, role + name, family, *shape) for name, shape in shapes.items()]


def _moe_rows(config: K3Config) -> list[_Row]:
    moe, D, E = config.moe, config.hidden_size, config.moe.num_experts
    block = "block_sparse_moe."
    rows = [
        _bf16(f"{block}gate", "moe.gate", Family.ROUTER, E, D),
        _f32(f"{block}gate.e_score_correction_bias", "moe.bias", Family.ROUTER, E),
    ]
    latent = moe.routed_expert_hidden_size
    if latent is not None:
        down, up = f"{block}routed_expert_down_proj", f"{block}routed_expert_up_proj"
        rows.append(_bf16(down, "moe.latent_down", Family.LATENT, latent, D))
        rows.append(_bf16(up, "moe.latent_up", Family.LATENT, D, latent))
        if moe.latent_moe_use_norm:
            norm = f"{block}routed_expert_norm"
            rows.append(_bf16(norm, "moe.latent_norm", Family.LATENT, latent))
    if moe.num_shared_experts:
        inner = moe.num_shared_experts * moe.moe_intermediate_size
        shared = f"{block}shared_experts."
        rows += _mlp_rows(shared, "moe.shared.", D, inner, Family.SHARED_EXPERTS)
    return rows


def _expert_tensors(
    config: K3Config, prefix: str, layer: int, shard: int, *, packed: bool
) -> list[TensorSpec]:
    width, inner = config.expert_width, config.moe.moe_intermediate_size
    shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    parts: list[tuple[str, str, str, str, tuple[int, ...]]] = []
    for matrix, (rows, cols) in shapes.items():
        role = f"expert.{matrix}"
        if not packed:
            parts.append((f".{matrix}.weight", role, "weight", "BF16", (rows, cols)))
            continue
        if cols % MX_BLOCK_SIZE:
            raise SchemaError(
                f"expert {matrix}: expected columns in whole blocks of {MX_BLOCK_SIZE} for MXFP4, "
                f"got {cols}"
            )
        grid = (rows, cols // MX_BLOCK_SIZE)
        parts.append((f".{matrix}.weight_packed", role, "packed", "U8", (rows, cols // 2)))
        parts.append((f".{matrix}.weight_scale", role, "scale", "U8", grid))
    stem, family = f"{prefix}block_sparse_moe.experts.", Family.ROUTED_EXPERTS
    return [
        TensorSpec(
            f"{stem}{expert}{suffix}", dtype, shape, role, part, family, layer, expert, shard
        )
        for expert in range(config.moe.num_experts)
        for suffix, role, part, dtype, shape in parts
    ]


def _global_rows(config: K3Config) -> list[_Row]:
    D, V, decoder = config.hidden_size, config.vocab_size, _decoder(config)
    head = "lm_head" if config.flat else "language_model.lm_head"
    rows = [
        _bf16(f"{decoder}embed_tokens", "embed_tokens", Family.EMBEDDING, V, D),
        _bf16(head, "lm_head", Family.LM_HEAD, V, D),
        _bf16(f"{decoder}norm", "norm", Family.NORMS, D),
    ]
    if config.attn_res_block_size is not None:
        norm, proj = "output_attn_res_norm", "output_attn_res_proj"
        rows.append(_bf16(decoder + norm, norm, Family.NORMS, D))
        rows.append(_bf16(decoder + proj, proj, Family.NORMS, 1, D))
    return rows


def _projector_rows(config: K3Config) -> list[_Row]:
    assert config.vision is not None
    merged = config.vision.hidden_size * math.prod(config.vision.merge_kernel_size)
    D, family = config.hidden_size, Family.PROJECTOR
    return [
        _bf16("proj.0", "projector.in", family, merged, merged),
        _bf16("proj.2", "projector.out", family, D, merged),
        _bf16("post_norm", "projector.norm", family, D),
    ]


def _vision_tensors(vision: VisionConfig, shard: int) -> list[TensorSpec]:
    W, qkv, inner, family = (
        vision.hidden_size, vision.qkv_hidden_size, vision.intermediate_size, Family.VISION,
    )  # fmt: skip
    grid = (vision.init_pos_emb_height, vision.init_pos_emb_width)
    patch = vision.patch_size
    ends = [
        _bf16("patch_embed.proj", "vision.patch_embed", family, W, 3, patch, patch),
        _bf16("patch_embed.pos_emb", "vision.pos_emb", family, *grid, W),
        _bf16("encoder.final_layernorm", "vision.final_norm", family, W),
    ]
    blocks = {
        "wqkv": (3 * qkv, W), "wo": (W, qkv), "mlp.fc0": (inner, W), "mlp.fc1": (W, inner),
        "norm0": (W,), "norm1": (W,),
    }  # fmt: skip
    specs = [_spec(row, "vision_tower.", None, shard) for row in ends]
    for block in range(vision.num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        for name, shape in blocks.items():
            specs.append(_spec(_bf16(name, f"vision.{name}", family, *shape), prefix, block, shard))
    return specs
