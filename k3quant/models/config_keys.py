"""Reading config keys one by one, each refusal with the key's path, what was expected, what came.

`KeyReader` remembers which keys were asked for, so that a key nobody knows can be refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from k3quant.errors import SchemaError

# Keys with one implemented value. A different value is another model.
IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "mla_use_nope": (True,),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True,),
    "num_nextn_predict_layers": (0,),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "chunk_size_feed_forward": (0,),
    "attn_bias": (False,),
    "linear_bias": (False,),
    "patch_embed_proj_bias": (False,),
    "activation_func": ("gelu_pytorch_tanh",),
    "merge_type": ("sd2_tpool",),
    "mlp_type": ("mlp2",),
    "mm_projector_type": ("patchmergerv2",),
    "norm_type": ("rmsnorm",),
    "pos_emb_type": ("divided_fixed",),
    "pos_emb_interpolation_mode": ("bilinear",),
    "projector_hidden_act": ("gelu",),
}

# Keys that serialisation leaves behind and that no forward pass reads.
INERT = frozenset(
    """
    _name_or_path architectures auto_map attn_implementation _attn_implementation
    begin_suppress_tokens bad_words_ids cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype torch_dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id head_dim id2label initializer_range label2id
    length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores output_router_logits
    prefix problem_type quantization_config remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torchscript transformers_version typical_p
    use_bfloat16 use_cache max_position_embeddings
    activation_situ_beta activation_situ_linear_beta
    """.split()
)
# Kimi-Linear's flat config also spells these; without rotation the rope keys have no meaning.
FLAT_OPTIONAL = frozenset(
    """
    rope_theta rope_scaling rope_parameters model_max_length aux_loss_alpha seq_aux
    attn_res_block_size routed_expert_hidden_size latent_moe_use_norm mla_use_output_gate
    """.split()
)
INERT_VISION = frozenset({"_attn_implementation", "attn_implementation", "model_type", "dtype"})


class KeyReader:
    """Typed access to one section of a config.

    Attributes:
        raw: The section as parsed.
        path: Prefix of its keys in messages, such as `text_config.`.
    """

    def __init__(self, raw: Mapping[str, Any], *, path: str) -> None:
        self.raw = raw
        self.path = path
        self._asked: set[str] = set()

    def _get(self, key: str) -> Any:
        self._asked.add(key)
        if key not in self.raw:
            raise SchemaError(
                f"{self.path}{key}: expected a value, got no such key",
                hint="its default elsewhere is another model's; copy the key from the release",
            )
        return self.raw[key]

    def _refuse(self, key: str, expected: str) -> SchemaError:
        return SchemaError(f"{self.path}{key}: expected {expected}, got {self.raw[key]!r}")

    def section(self, key: str) -> "KeyReader":
        """Return a nested section.

        Raises:
            SchemaError: It is missing or no object.
        """
        value = self._get(key)
        if not isinstance(value, Mapping):
            raise self._refuse(key, "an object")
        return KeyReader(value, path=f"{self.path}{key}.")

    def count(self, key: str, *, least: int = 1) -> int:
        """Return a required integer of at least `least`.

        Raises:
            SchemaError: It is missing, no integer, or smaller.
        """
        value = self._get(key)
        if type(value) is not int or value < least:
            raise self._refuse(key, f"an integer of at least {least}")
        return value

    def optional_count(self, key: str, *, may_miss: bool = True, least: int = 0) -> int | None:
        """Return an integer, or None where the value is null (or, if it may miss, absent).

        Raises:
            SchemaError: It is neither, or absent where it must be stated.
        """
        self._asked.add(key)
        if may_miss and key not in self.raw:
            return None
        return None if self._get(key) is None else self.count(key, least=least)

    def number(self, key: str) -> float:
        """Return a required finite positive number.

        Raises:
            SchemaError: It is missing, not finite or not positive.
        """
        value = self._finite(key)
        if value <= 0:
            raise self._refuse(key, "a positive number")
        return value

    def optional_number(self, key: str, *, may_miss: bool) -> float | None:
        """Return a finite number of any sign, or None where it is null (or may miss and does).

        Raises:
            SchemaError: It is neither, or absent where it must be stated.
        """
        self._asked.add(key)
        if may_miss and key not in self.raw:
            return None
        return None if self._get(key) is None else self._finite(key)

    def _finite(self, key: str) -> float:
        value = self._get(key)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._refuse(key, "a finite number")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return a boolean; None as default means it must be stated.

        Raises:
            SchemaError: It is no boolean, or absent without a default.
        """
        self._asked.add(key)
        if default is not None and key not in self.raw:
            return default
        value = self._get(key)
        if type(value) is not bool:
            raise self._refuse(key, "true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed words.

        Raises:
            SchemaError: It is missing or another word.
        """
        value = self._get(key)
        if value not in allowed or not isinstance(value, str):
            raise self._refuse(key, " or ".join(f"`{word}`" for word in allowed))
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """Return a list of integers of at least one.

        Raises:
            SchemaError: It is missing or holds something else.
        """
        value = self._get(key)
        if not isinstance(value, list) or any(type(item) is not int or item < 1 for item in value):
            raise self._refuse(key, "a list of integers of at least 1")
        return tuple(value)

    def must_equal(self, key: str, expected: int, *, because: str) -> None:
        """Check a key that another key already decides.

        Raises:
            SchemaError: It is missing or differs.
        """
        if self._get(key) != expected:
            raise self._refuse(key, f"{expected} ({because})")

    def check_values(
        self, allowed: Mapping[str, tuple[Any, ...]], *, required: tuple[str, ...] = ()
    ) -> None:
        """Refuse values that are not implemented, among the keys of `allowed` that are present.

        Raises:
            SchemaError: A value is not implemented, or a required key is missing.
        """
        for key in required:
            self._get(key)
        for key, values in allowed.items():
            if key in self.raw:
                self._asked.add(key)
                if self.raw[key] not in values:
                    spelled = " or ".join(repr(value) for value in values)
                    raise self._refuse(key, f"{spelled}, the only value implemented")

    def refuse_unknown(self, *, known: frozenset[str] = frozenset()) -> None:
        """Refuse keys that were neither read nor known to be inert, unless null or false.

        Call it after all keys were read.

        Raises:
            SchemaError: A key is not known.
        """
        for key, value in self.raw.items():
            if key in known or key in self._asked or value is None or value is False:
                continue
            raise SchemaError(
                f"{self.path}{key}: expected only keys of Kimi-K3's config, got {value!r}",
                hint="the key is not implemented; remove it if it does not change the model",
            )
