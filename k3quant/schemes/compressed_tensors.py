"""The compressed-tensors spelling, with a config that targets what is quantized and nothing else.

Patterns are made from the table, so that they match exactly the converted modules; every other
Linear is named in `ignore`, because loaders differ in what they do with a module that neither
list names. The section stands at the top level of config.json, where every loader looks first.

Source: vllm-project/compressed-tensors `quantization/quant_config.py` and `compressors/`;
vllm-project/vllm `quantization/compressed_tensors/`.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from k3quant.convert.choice import Choice, Format, encoded_parts
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import num_shards, shard_tensors
from k3quant.schemes.scheme import Array, Assignment, Entry, Scheme

FORMAT_WORDS: Mapping[Format, str] = {
    Format.MXFP4: "mxfp4-pack-quantized",
    Format.NVFP4: "nvfp4-pack-quantized",
    Format.MXFP8: "mxfp8-quantized",
    Format.FP8_BLOCK: "float-quantized",
    Format.FP8_CHANNEL: "float-quantized",
    Format.INT8: "int-quantized",
    Format.INT4: "pack-quantized",
}
_NUMBER = re.compile(r"\d+")
_PREFIXES = ("language_model.model.", "language_model.", "model.")


def quantization_section(k3: K3Config, assignment: Assignment) -> dict[str, Any] | None:
    """Return the quantization section of an export, None where nothing is quantized.

    Args:
        k3: The typed config.
        assignment: Format of each converted module; modules that became bf16 are not quantized.
    """
    quantized = {m: c for m, c in assignment.items() if c.format in FORMAT_WORDS}
    if not quantized:
        return None
    everything = linear_names(k3)
    groups: dict[tuple[Format, int], list[str]] = defaultdict(list)
    for module, choice in quantized.items():
        groups[choice.format, choice.group_size].append(module)
    words = {FORMAT_WORDS[form] for form, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": words.pop() if len(words) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{number}": {
                "format": FORMAT_WORDS[form],
                "targets": patterns(modules, everything),
                "weights": _weights(form, group_size),
                "input_activations": _activations(form),
                "output_activations": None,
            }
            for number, ((form, group_size), modules) in enumerate(sorted(groups.items()))
        },
        "ignore": patterns((m for m in everything if m not in quantized), everything),
    }


def linear_names(k3: K3Config) -> list[str]:
    """Return every module that a loader may build as a Linear; the router is one in some."""
    return [
        spec.module
        for shard in range(1, num_shards(k3) + 1)
        for spec in shard_tensors(k3, shard, packed=False)
        if len(spec.shape) == 2 and spec.role != "embed_tokens" and spec.part == "weight"
        if spec.name.endswith(".weight")
    ]


def patterns(modules: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Return regular expressions that match the given modules and no other of `everything`.

    Modules whose names differ in numbers alone share one expression; where not all of them are
    meant, the numbers are spelled out.
    """
    total: dict[str, int] = defaultdict(int)
    for module in everything:
        total[_NUMBER.sub("#", module)] += 1
    meant: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for module in modules:
        meant[_NUMBER.sub("#", module)].append(tuple(_NUMBER.findall(module)))
    result: list[str] = []
    for form, numbers in sorted(meant.items()):
        if len(numbers) == total[form]:
            result.append(_pattern(form, [r"\d+"] * form.count("#")))
            continue
        # Every set of last numbers, with the leading numbers that go with it
        lasts: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for number in numbers:
            lasts[number[:-1]].append(number[-1])
        leads: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for start, ends_of in lasts.items():
            leads[tuple(ends_of)].append(start)
        for last, firsts in leads.items():
            if len(firsts[0]) == 1:
                firsts = [(_either(lead[0] for lead in firsts),)]
            ends = _either(last)
            result += [_pattern(form, [*first, ends]) for first in firsts]
    return result


def _pattern(form: str, numbers: list[str]) -> str:
    for prefix in _PREFIXES:
        form = form.removeprefix(prefix)
    pieces = [re.escape(piece) for piece in form.split("#")]
    text = pieces[0]
    for number, piece in zip(numbers, pieces[1:], strict=True):
        text += number + piece
    # Loaders put their own prefixes before a name; `(^|\.)` keeps `mlp` from matching in `xmlp`.
    return rf"re:(.*\.)?{text}$"


def _either(numbers: Iterable[str]) -> str:
    return f"({'|'.join(numbers)})"


def _weights(form: Format, group_size: int) -> dict[str, Any]:
    common: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    match form:
        case Format.MXFP4:
            own = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                   "scale_dtype": "torch.uint8"}  # fmt: skip
        case Format.NVFP4:
            own = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                   "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
        case Format.MXFP8:
            own = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                   "scale_dtype": "torch.uint8"}  # fmt: skip
        case Format.FP8_BLOCK:
            own = {"num_bits": 8, "type": "float", "strategy": "block",
                   "block_structure": [128, 128]}  # fmt: skip
        case Format.FP8_CHANNEL:
            own = {"num_bits": 8, "type": "float", "strategy": "channel"}
        case Format.INT8:
            own = {"num_bits": 8, "type": "int", "strategy": "channel"}
        case Format.INT4:
            own = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        case _:
            raise ValueError(f"{form}: expected a quantized format")
    return {**own, **common}


def _activations(form: Format) -> dict[str, Any] | None:
    """Return what the consumer quantizes at run time: its 8-bit kernels need 8-bit inputs."""
    common: dict[str, Any] = {"num_bits": 8, "symmetric": True, "dynamic": True}
    match form:
        case Format.FP8_BLOCK:
            return {**common, "type": "float", "strategy": "group", "group_size": 128}
        case Format.FP8_CHANNEL:
            return {**common, "type": "float", "strategy": "token"}
        case Format.INT8:
            return {**common, "type": "int", "strategy": "token"}
        case _:
            return None


def _entries(choice: Choice, module: str, rows: int, cols: int) -> list[Entry]:
    return [
        (f"{module}.{part.part}", part.dtype, part.shape)
        for part in encoded_parts(choice, rows, cols)
    ]


def _suffix(choice: Choice, part: str) -> str:
    return part


def _value(part: str, array: Array) -> Array:
    return array


def _constants(choice: Choice) -> dict[str, Array]:
    return {}


def _documents(config: dict[str, Any], k3: K3Config, assignment: Assignment) -> dict[str, Any]:
    result = copy.deepcopy(config)
    result.pop("quantization_config", None)
    if not k3.flat:
        result["text_config"].pop("quantization_config", None)
    section = quantization_section(k3, assignment)
    if section is not None:
        result["quantization_config"] = section
    return {"config.json": result}


COMPRESSED_TENSORS = Scheme(
    name="compressed-tensors",
    formats=frozenset({*FORMAT_WORDS, Format.BF16, Format.KEEP}),
    suffixes=_suffix,
    entries=_entries,
    value=_value,
    constants=_constants,
    documents=_documents,
)
