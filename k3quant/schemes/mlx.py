"""Kimi-K3 as mlx-lm saves a model: safetensors with fused names, one config section, an index.

Every value is kept. `mlx_lm.utils.load_model(folder, strict=True)` finds nothing to rename.
"""

import json
from collections.abc import Collection, Sequence
from copy import deepcopy
from math import prod
from typing import Any

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import INDEX_FILE, SINGLE_FILE
from k3quant.checkpoint.reader import CONFIG_FILE, Checkpoint
from k3quant.convert.card import CARD_FILE
from k3quant.convert.export_plan import ExportPlan, FilePlan
from k3quant.convert.sidecars import sidecar_files
from k3quant.errors import RefusedError
from k3quant.models.k3_config import K3Config, read_config
from k3quant.schemes.bundles import (
    Bundle,
    OutputTensor,
    account_for_all,
    experts_are_packed,
    fill_files,
    forecast,
)
from k3quant.schemes.mlx_tensors import TRANSFORMS, plan_bundles

QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "mxfp4"}

_METADATA = {"format": "mlx"}
_INFO_BYTES = 160  # bound of a header's entry besides the name
_CODES_A_WORD = 8

# Words on the source's weights, which a reader would take for words on these.
_REPLACED = frozenset({CONFIG_FILE, "hf_quant_config.json", CARD_FILE})


def plan_mlx(
    checkpoint: Checkpoint,
    *,
    max_file_bytes: int = 5_000_000_000,
    allow_skip: Collection[str] = (),
) -> ExportPlan:
    """Plan an MLX export.

    Args:
        checkpoint: A Kimi-K3 whose experts are MXFP4 pairs or floats.
        max_file_bytes: Files grow up to this size; a tensor that is larger stands alone.
        allow_skip: Regular expressions; an unknown tensor that one matches whole may stay behind.

    Returns:
        The plan.

    Raises:
        SchemaError: Config or tensors are not Kimi-K3's.
        RefusedError: The target cannot hold the model, or a tensor would be lost.
    """
    config = read_config(checkpoint.config)
    check_expressible(config)
    packed = experts_are_packed(checkpoint)
    bundles = list(plan_bundles(config, checkpoint, packed=packed))
    skipped = account_for_all(checkpoint, bundles, config, allow_skip=allow_skip)
    parts = fill_files(bundles, max_bytes=max_file_bytes, cost=_cost)
    names = [
        SINGLE_FILE if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        for i in range(len(parts))
    ]
    return ExportPlan(
        target="mlx",
        scheme="mlx",
        files=tuple(map(_file_plan, names, parts)),
        documents={
            CONFIG_FILE: _encode_config(checkpoint.config, packed=packed),
            INDEX_FILE: _encode_index(names, parts),
        },
        sidecars=tuple(sidecar_files(checkpoint, replaced=_REPLACED)),
        skipped=skipped,
        transforms=TRANSFORMS,
        forecasts=forecast(bundles),
    )


def check_expressible(config: K3Config) -> None:
    """Refuse a model that mlx-lm's `kimi_k3` would run as another one.

    Raises:
        RefusedError: It would.

    Source: ml-explore/mlx-lm, `mlx_lm/models/kimi_k3.py`, `TextArgs`.
    """
    needs = (
        ("model_type", "kimi_k3", "kimi_linear" if config.flat else "kimi_k3"),
        ("hidden_act", "situ", config.hidden_act),
        ("moe_router_activation_func", "sigmoid", config.moe.moe_router_activation_func),
    )
    for key, expected, got in needs:
        if got != expected:
            raise RefusedError(
                f"{key}: expected {expected}, got {got}",
                hint="mlx-lm's `kimi_k3` knows no other",
            )


def _cost(bundle: Bundle) -> int:
    return sum(t.num_bytes + len(t.name.encode()) + _INFO_BYTES for t in bundle.tensors)


def _file_plan(name: str, bundles: Sequence[Bundle]) -> FilePlan:
    tensors = _tensors(bundles)
    entries = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    header, placed = encode_header(entries, metadata=_METADATA)
    start = len(header)
    return FilePlan(
        name=name,
        header=header,
        places={name: (start + entry.begin, start + entry.end) for name, entry in placed.items()},
        file_bytes=start + sum(tensor.num_bytes for tensor in tensors),
        units=tuple(unit for bundle in bundles for unit in bundle.units),
    )


def _encode_config(source: dict[str, Any], *, packed: bool) -> bytes:
    config = deepcopy(source)
    for key in ("_name_or_path", "vision_config"):
        config.pop(key, None)
    for key in ("quantization", "quantization_config", "compression_config"):
        config.pop(key, None)
        config["text_config"].pop(key, None)
    if packed:
        config["quantization"] = config["quantization_config"] = QUANTIZATION
    return json.dumps(dict(sorted(config.items())), indent=4, ensure_ascii=False).encode() + b"\n"


def _encode_index(names: Sequence[str], parts: Sequence[Sequence[Bundle]]) -> bytes:
    weight_map = {
        tensor.name: name
        for name, part in zip(names, parts, strict=True)
        for tensor in _tensors(part)
    }
    tensors = [tensor for part in parts for tensor in _tensors(part)]
    document = {
        "metadata": {
            "total_size": sum(tensor.num_bytes for tensor in tensors),
            "total_parameters": sum(map(_parameters, tensors)),
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(document, indent=4).encode()


def _parameters(tensor: OutputTensor) -> int:
    """Return logical weights: a word holds eight codes, scale bytes count nothing."""
    each = {"U32": _CODES_A_WORD, "U8": 0}.get(tensor.dtype, 1)
    return prod(tensor.shape) * each


def _tensors(bundles: Sequence[Bundle]) -> list[OutputTensor]:
    return [tensor for bundle in bundles for tensor in bundle.tensors]
