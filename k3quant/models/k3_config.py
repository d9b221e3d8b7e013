"""The typed config of Kimi-K3 and of its Kimi-Linear relatives.

`read_config` takes what `config.json` holds and refuses by name whatever would change the model in
silence: a value that is not implemented, a missing key that has a default elsewhere, a
contradiction. Layer lists in the file are 1-based; everything here is 0-based.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from k3quant.errors import SchemaError
from k3quant.models.config_keys import FLAT_OPTIONAL, IMPLEMENTED, INERT, INERT_VISION, KeyReader


class LayerKind(StrEnum):
    """Attention of a layer: linear (KDA) or latent (MLA)."""

    KDA = "kda"
    MLA = "mla"


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """Kimi delta attention. `gate_lower_bound` None means the softplus decay."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    use_full_rank_gate: bool

    @property
    def width(self) -> int:
        """Channels of q, k and v: heads x head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Gated latent attention without rotation. `q_lora_rank` None means one plain q projection."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of q and k per head: the private part and the part shared by heads."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed and shared experts. `routed_expert_hidden_size` None means no latent space."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    moe_router_activation_func: str
    num_expert_group: int
    topk_group: int
    moe_renormalize: bool
    routed_scaling_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 and its projector."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    qkv_hidden_size: int
    patch_size: int
    merge_kernel_size: tuple[int, int]
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    projector_ln_eps: float


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Everything about a checkpoint that its config decides.

    `attn_res_block_size` None means ordinary residual additions; `packed_experts` says that the
    quantization section calls the routed experts MXFP4; `flat` is the Kimi-Linear spelling, whose
    names start at `model.`; `media_placeholder_token_id` exists only with `vision`.
    """

    flat: bool
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    hidden_act: str
    activation_situ_beta: float | None
    activation_situ_linear_beta: float | None
    attn_res_block_size: int | None
    layer_kinds: tuple[LayerKind, ...]
    first_k_dense_replace: int
    moe_layer_freq: int
    max_position_embeddings: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    media_placeholder_token_id: int | None
    packed_experts: bool
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    vision: VisionConfig | None

    def is_moe(self, layer: int) -> bool:
        """Return whether a 0-based layer routes to experts (else it has one dense MLP)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers that route to experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    @property
    def expert_width(self) -> int:
        """Width of the space the routed experts read and write."""
        return self.moe.routed_expert_hidden_size or self.hidden_size


def looks_like_k3(config: Mapping[str, Any]) -> bool:
    """Return whether a config claims to be Kimi-K3's or a Kimi-Linear relative's."""
    return config.get("model_type") in {"kimi_k3", "kimi_linear"}


def read_config(config: Mapping[str, Any]) -> K3Config:
    """Read a parsed `config.json`, nested (`kimi_k3`) or flat (`kimi_linear`).

    Raises:
        SchemaError: A key is missing, unknown, not implemented, or contradicts another.

    Source: the released config.json and the vendor's configuration classes (defaults that bite).
    """
    if not looks_like_k3(config):
        raise SchemaError(
            "config.json: expected model_type `kimi_k3` or `kimi_linear`, "
            f"got `{config.get('model_type')}`",
        )
    flat = config["model_type"] == "kimi_linear"
    section = config if flat else config.get("text_config")
    if not isinstance(section, Mapping):
        raise SchemaError(
            "config.json: expected an object `text_config`, got none",
            hint="a nested Kimi-K3 config keeps the language model's keys in `text_config`",
        )
    text = KeyReader(section, path="" if flat else "text_config.")
    text.check_values(IMPLEMENTED, required=("mla_use_nope", "tie_word_embeddings"))
    vision = None if flat else _read_vision(config, text)
    result = _read_text(config, text, flat=flat, vision=vision)
    text.refuse_unknown(known=INERT | FLAT_OPTIONAL if flat else INERT)
    if not flat:
        _check_agreement(config, section)
    return result


def _read_text(
    config: Mapping[str, Any], text: KeyReader, *, flat: bool, vision: VisionConfig | None
) -> K3Config:
    num_layers = text.count("num_hidden_layers")
    linear = text.section("linear_attn_config")
    kda = KdaConfig(
        num_heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        short_conv_kernel_size=linear.count("short_conv_kernel_size"),
        # A flat config that says nothing has the older forms; a nested one must say it.
        gate_lower_bound=linear.optional_number("gate_lower_bound", may_miss=flat),
        use_full_rank_gate=linear.flag("use_full_rank_gate", default=False if flat else None),
    )
    if kda.gate_lower_bound is not None and not kda.gate_lower_bound < 0:
        raise SchemaError(
            f"{linear.path}gate_lower_bound: expected a negative number, got {kda.gate_lower_bound}"
        )
    layer_kinds = _layer_kinds(linear, num_layers)
    linear.refuse_unknown()
    act = text.choice("hidden_act", ("situ", "silu"))
    situ = act == "situ"
    first_dense = text.count("first_k_dense_replace", least=0)
    token_ids = {
        key: text.optional_count(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    vocab_size = text.count("vocab_size")
    for key, token in token_ids.items():
        if token is not None and token >= vocab_size:
            raise SchemaError(
                f"{text.path}{key}: expected an id below vocab_size {vocab_size}, got {token}"
            )
    return K3Config(
        flat=flat,
        hidden_size=text.count("hidden_size"),
        intermediate_size=text.count("intermediate_size"),
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        rms_norm_eps=text.number("rms_norm_eps"),
        hidden_act=act,
        activation_situ_beta=text.number("activation_situ_beta") if situ else None,
        activation_situ_linear_beta=text.number("activation_situ_linear_beta") if situ else None,
        attn_res_block_size=text.optional_count("attn_res_block_size", may_miss=flat, least=1),
        layer_kinds=layer_kinds,
        first_k_dense_replace=first_dense,
        moe_layer_freq=text.count("moe_layer_freq"),
        max_position_embeddings=text.optional_count("max_position_embeddings")
        or text.optional_count("model_max_length"),
        **token_ids,
        media_placeholder_token_id=_media_id(config, vocab_size) if vision else None,
        packed_experts=_packs_experts(config, text),
        kda=kda,
        mla=_read_mla(text, flat=flat),
        moe=_read_moe(text, flat=flat),
        vision=vision,
    )


def _read_mla(text: KeyReader, *, flat: bool) -> MlaConfig:
    heads = text.count("num_attention_heads")
    text.must_equal("num_key_value_heads", heads, because="latent attention has one k and v a head")
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=text.optional_count("q_lora_rank", least=1),
        kv_lora_rank=text.count("kv_lora_rank"),
        qk_nope_head_dim=text.count("qk_nope_head_dim"),
        qk_rope_head_dim=text.count("qk_rope_head_dim"),
        v_head_dim=text.count("v_head_dim"),
        mla_use_output_gate=text.flag("mla_use_output_gate", default=False if flat else None),
    )


def _read_moe(text: KeyReader, *, flat: bool) -> MoeConfig:
    moe = MoeConfig(
        num_experts=text.count("num_experts"),
        num_experts_per_token=text.count("num_experts_per_token"),
        num_shared_experts=text.count("num_shared_experts", least=0),
        moe_intermediate_size=text.count("moe_intermediate_size"),
        routed_expert_hidden_size=text.optional_count(
            "routed_expert_hidden_size", may_miss=flat, least=1
        ),
        latent_moe_use_norm=text.flag("latent_moe_use_norm", default=False if flat else None),
        moe_router_activation_func=text.choice(
            "moe_router_activation_func", ("sigmoid", "softmax")
        ),
        num_expert_group=text.count("num_expert_group"),
        topk_group=text.count("topk_group"),
        moe_renormalize=text.flag("moe_renormalize"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
    )
    groups, where = moe.num_expert_group, text.path
    if moe.num_experts % groups:
        raise SchemaError(
            f"{where}num_expert_group: expected a divisor of num_experts {moe.num_experts}, "
            f"got {groups}"
        )
    if moe.topk_group > groups:
        raise SchemaError(
            f"{where}topk_group: expected at most num_expert_group {groups}, got {moe.topk_group}"
        )
    reachable = moe.num_experts // groups * moe.topk_group
    if moe.num_experts_per_token > reachable:
        raise SchemaError(
            f"{where}num_experts_per_token: expected at most the {reachable} experts that "
            f"{moe.topk_group} of {groups} groups hold, got {moe.num_experts_per_token}"
        )
    return moe


def _layer_kinds(linear: KeyReader, num_layers: int) -> tuple[LayerKind, ...]:
    kinds: dict[int, LayerKind] = {}
    for key, kind in (("kda_layers", LayerKind.KDA), ("full_attn_layers", LayerKind.MLA)):
        for number in linear.counts(key):
            if number > num_layers:
                raise SchemaError(
                    f"{linear.path}{key}: expected 1-based layers up to num_hidden_layers "
                    f"{num_layers}, got {number}"
                )
            if number in kinds:
                raise SchemaError(
                    f"{linear.path}{key}: expected each layer once, got layer {number} twice"
                )
            kinds[number] = kind
    missing = [number for number in range(1, num_layers + 1) if number not in kinds]
    if missing:
        raise SchemaError(
            f"{linear.path}kda_layers and full_attn_layers: expected all 1-based layers up to "
            f"{num_layers}, got none for {missing[:8]}"
        )
    return tuple(kinds[number] for number in range(1, num_layers + 1))


def _packs_experts(config: Mapping[str, Any], text: KeyReader) -> bool:
    # Loaders look at the top level first; the release keeps the section in `text_config`.
    section = config.get("quantization_config") or text.raw.get("quantization_config")
    if not isinstance(section, Mapping):
        return False
    formats = {section.get("format")}
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            formats.add(group.get("format"))
    return "mxfp4-pack-quantized" in formats


def _media_id(config: Mapping[str, Any], vocab_size: int) -> int:
    media = KeyReader(config, path="").count("media_placeholder_token_id", least=0)
    if media >= vocab_size:
        raise SchemaError(
            f"media_placeholder_token_id: expected an id below vocab_size {vocab_size}, got {media}"
        )
    return media


def _read_vision(config: Mapping[str, Any], text: KeyReader) -> VisionConfig | None:
    if config.get("vision_config") is None:
        return None
    vision = KeyReader(config, path="").section("vision_config")
    vision.check_values(IMPLEMENTED)
    hidden = text.count("hidden_size")
    width = vision.count("vt_hidden_size")
    heads = vision.count("vt_num_attention_heads")
    qkv = vision.count("qkv_hidden_size")
    vision.must_equal("text_hidden_size", hidden, because="the projector ends in the text width")
    vision.must_equal("mm_hidden_size", width, because="the projector reads the tower's width")
    if qkv % (4 * heads):
        raise SchemaError(
            f"vision_config.qkv_hidden_size: expected a multiple of 4 x {heads} heads, got {qkv}",
            hint="each head is rotated by rows and columns, in pairs",
        )
    merge = vision.counts("merge_kernel_size")
    if merge != (2, 2):
        raise SchemaError(f"vision_config.merge_kernel_size: expected [2, 2], got {list(merge)}")
    result = VisionConfig(
        num_hidden_layers=vision.count("vt_num_hidden_layers"),
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=vision.count("vt_intermediate_size"),
        qkv_hidden_size=qkv,
        patch_size=vision.count("patch_size"),
        merge_kernel_size=(merge[0], merge[1]),
        init_pos_emb_height=vision.count("init_pos_emb_height"),
        init_pos_emb_width=vision.count("init_pos_emb_width"),
        init_pos_emb_time=vision.count("init_pos_emb_time"),
        projector_ln_eps=vision.number("projector_ln_eps"),
    )
    vision.refuse_unknown(known=INERT_VISION)
    return result


def _check_agreement(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        outer, inner = config.get(key), text.get(key)
        if outer is not None and inner is not None and outer != inner:
            raise SchemaError(
                f"config.json: expected `{key}` to agree with text_config's {inner}, got {outer}"
            )
