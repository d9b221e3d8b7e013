"""The ModelOpt spelling: NVFP4 experts and FP8 tiles, named in `hf_quant_config.json`.

Source: NVIDIA/Model-Optimizer `examples/kimi/kimi_k3/quantize_to_nvfp4.py` and
`modelopt/torch/export/`. Here `weight_scale_2` multiplies; compressed-tensors' global divides.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from k3quant import __version__
from k3quant.convert.choice import GLOBAL, PACKED, SCALE, Choice, Format, encoded_parts
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import Family, shard_tensors
from k3quant.schemes.compressed_tensors import linear_names
from k3quant.schemes.scheme import Array, Assignment, Entry, Scheme

QUANT_FILE = "hf_quant_config.json"
ALGORITHMS: Mapping[Format, dict[str, Any]] = {
    Format.NVFP4: {"quant_algo": "NVFP4", "group_size": 16},
    Format.FP8_BLOCK: {"quant_algo": "FP8_PB_WO"},
    Format.MXFP8: {"quant_algo": "MXFP8"},
}
# What a loader stacks into one matrix, by the name it then looks up.
_FUSED: Mapping[str, tuple[str, ...]] = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "fused_qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def _suffix(choice: Choice, part: str) -> str:
    if choice.format is Format.NVFP4:
        return {PACKED: "weight", GLOBAL: "weight_scale_2"}.get(part, part)
    return part


def _entries(choice: Choice, module: str, rows: int, cols: int) -> list[Entry]:
    entries: list[Entry] = []
    for part in encoded_parts(choice, rows, cols):
        shape = part.shape
        if part.part == GLOBAL:
            shape = ()
        elif part.part == SCALE and choice.format is Format.FP8_BLOCK:
            shape = (shape[0], 1, shape[1], 1)
        entries.append((f"{module}.{_suffix(choice, part.part)}", part.dtype, shape))
    entries += [(f"{module}.{s}", "F32", a.shape) for s, a in _constants(choice).items()]
    return entries


def _value(part: str, array: Array) -> Array:
    if part == GLOBAL:
        return np.reciprocal(array.astype(np.float32)).reshape(())
    return array


def _constants(choice: Choice) -> dict[str, Array]:
    # Weights came from MXFP4 without calibration; 1.0 is the published export's input scale.
    return {"input_scale": np.ones((), np.float32)} if choice.format is Format.NVFP4 else {}


def _documents(config: dict[str, Any], k3: K3Config, assignment: Assignment) -> dict[str, Any]:
    layers = _quantized_layers(k3, assignment)
    excluded = _excluded(k3, assignment)
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "quantized_layers": layers,
        "exclude_modules": excluded,
    }
    producer = {"name": "k3quant", "version": __version__}
    result = copy.deepcopy(config)
    if not k3.flat:
        result["text_config"].pop("quantization_config", None)
    groups: dict[str, dict[str, Any]] = {}
    for name, algorithm in sorted(layers.items()):
        word = algorithm["quant_algo"]
        group = groups.setdefault(word, {**_group(algorithm), "targets": []})
        group["targets"].append(name)
    result["quantization_config"] = {
        "config_groups": {f"group_{i}": groups[word] for i, word in enumerate(sorted(groups))},
        "quantized_layers": layers,
        "ignore": excluded,
        "quant_algo": "MIXED_PRECISION",
        "producer": producer,
        # The plain word makes one loader ignore the map of layers.
        "quant_method": "modelopt_mixed",
    }
    return {
        QUANT_FILE: {"producer": producer, "quantization": quantization},
        "config.json": result,
    }


def _group(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    if algorithm["quant_algo"] == "NVFP4":
        common = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        return {"weights": common, "input_activations": dict(common)}
    return {"quant_algo": algorithm["quant_algo"]}


def _quantized_layers(k3: K3Config, assignment: Assignment) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for module, choice in assignment.items():
        algorithm = ALGORITHMS.get(choice.format)
        if algorithm is not None:
            name = (
                module.partition(".experts.")[0] + ".experts" if ".experts." in module else module
            )
            for alias in _aliases(name):
                layers[alias] = algorithm
    for layer in range(k3.num_hidden_layers):
        attention = f"{_attention_of(k3, layer)}"
        for fused, parts in _FUSED.items():
            found = [assignment.get(f"{attention}.{part}") for part in parts]
            words = {
                ALGORITHMS[c.format]["quant_algo"] for c in found if c and c.format in ALGORITHMS
            }
            if None not in found and len(words) == 1 and found[0] is not None:
                for alias in _aliases(f"{attention}.{fused}"):
                    layers[alias] = ALGORITHMS[found[0].format]
    return dict(sorted(layers.items()))


def _attention_of(k3: K3Config, layer: int) -> str:
    specs = shard_tensors(k3, layer + 1, packed=False)
    attention = next(s for s in specs if s.family in (Family.KDA, Family.MLA))
    return attention.name.partition(".self_attn.")[0] + ".self_attn"


def _aliases(name: str) -> Iterable[str]:
    """Yield a module under every name that loaders give it."""
    inner = name.removeprefix("language_model.")
    names = dict.fromkeys((name, inner, inner.removeprefix("model.")))
    for alias in names:
        yield alias
        if ".block_sparse_moe." in alias:
            yield alias.replace(".block_sparse_moe.", ".mlp.")


def _excluded(k3: K3Config, assignment: Assignment) -> list[str]:
    """Return wildcards of the modules that are left alone, checked against those that are not."""
    left = [m for m in linear_names(k3) if assignment.get(m, _NONE).format not in ALGORITHMS]
    quantized = [m for m, choice in assignment.items() if choice.format in ALGORITHMS]
    excluded: dict[str, None] = {}
    for module in left:
        tail = module.rpartition(".layers.")[2].partition(".")[2]
        # A loader takes an entry as a substring too, so it must be part of no converted name.
        wide = bool(tail) and not any(tail in other for other in quantized)
        excluded[f"*{tail}*" if wide else module] = None
    return list(excluded)


_NONE = Choice(format=Format.KEEP)

MODELOPT = Scheme(
    name="modelopt",
    formats=frozenset({*ALGORITHMS, Format.KEEP}),
    suffixes=_suffix,
    entries=_entries,
    value=_value,
    constants=_constants,
    documents=_documents,
)
