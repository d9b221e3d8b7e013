"""What a checkpoint, a config or a built-in profile holds, counted."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.errors import IncompleteError, SchemaError
from k3quant.formats.dtypes import DTYPES
from k3quant.manifest import built_in_names, load_config
from k3quant.models.k3_config import K3Config, looks_like_k3, read_config
from k3quant.models.k3_counts import ModelCount, count_model
from k3quant.models.k3_tensors import num_shards, shard_content, shard_name, shard_tensors
from k3quant.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What was found at a place.

    Attributes:
        place: The path or name that was given.
        kind: `checkpoint`, `config` or `profile`.
        k3: The typed config, None for a checkpoint of another model.
        counts: What the config implies, None without `k3`.
        dtypes: Stored tensors and bytes by dtype, for a checkpoint.
        shards: File, content, tensors and bytes of each shard.
        scales: E8M0 bytes by expert matrix, where they were asked for.
    """

    place: str
    kind: str
    k3: K3Config | None
    counts: ModelCount | None
    dtypes: Mapping[str, tuple[int, int]]
    shards: tuple[tuple[str, str, int, int], ...]
    scales: Mapping[str, Mapping[int, int]] | None

    def to_json(self) -> dict[str, Any]:
        """Return the description ready for JSON."""
        k3, counts = self.k3, self.counts
        document: dict[str, Any] = {"place": self.place, "kind": self.kind}
        if counts is not None:
            document |= {
                "tensors": counts.tensors,
                "parameters": counts.parameters,
                "active_parameters": counts.active_parameters,
                "tensor_bytes": counts.tensor_bytes,
                "families": {
                    family.value: {
                        "tensors": n.tensors,
                        "parameters": n.parameters,
                        "tensor_bytes": n.tensor_bytes,
                    }
                    for family, n in counts.families.items()
                },
            }
        if k3 is not None:
            document["layers"] = [
                {"layer": i, "attention": kind.value, "mlp": "moe" if k3.is_moe(i) else "dense"}
                for i, kind in enumerate(k3.layer_kinds)
            ]
        if self.kind == "checkpoint":
            document["stored_tensors"] = sum(n for n, _ in self.dtypes.values())
            document["stored_bytes"] = sum(size for _, size in self.dtypes.values())
            document["dtypes"] = {
                dtype: {"tensors": n, "tensor_bytes": size}
                for dtype, (n, size) in self.dtypes.items()
            }
        document["shards"] = [
            {"file": file, "content": content, "tensors": n, "tensor_bytes": size}
            for file, content, n, size in self.shards
        ]
        if self.scales is not None:
            document["scales"] = {
                matrix: {str(byte): n for byte, n in sorted(counts.items())}
                for matrix, counts in self.scales.items()
            }
        return document


def describe(place: str, *, scales: bool = False, progress: Progress = SILENT) -> Description:
    """Describe a folder, a config.json or a built-in profile.

    Args:
        place: Path or name.
        scales: Whether to count the E8M0 bytes of routed experts, which reads them all.
        progress: Told the bytes of scales read.

    Raises:
        IncompleteError: There is nothing of that name, or no scales to count.
        SchemaError: A config that is no Kimi-K3's, where only a config was given.
    """
    path = Path(place)
    if path.is_dir():
        return _describe_checkpoint(place, open_checkpoint(path), scales, progress)
    if scales:
        raise IncompleteError(f"{place}: expected a checkpoint to count scales in, got a config")
    if path.is_file():
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise SchemaError(f"{place}: expected JSON, got {error}") from error
        if not isinstance(config, dict):
            raise SchemaError(f"{place}: expected an object, got {type(config).__name__}")
        return _describe_config(place, "config", read_config(config))
    if place in built_in_names():
        return _describe_config(place, "profile", read_config(load_config(place)))
    raise IncompleteError(
        f"{place}: expected a folder, a config.json or a built-in name, got nothing of that name",
        hint=f"built-in names: {', '.join(built_in_names())}",
    )


def _describe_config(place: str, kind: str, k3: K3Config) -> Description:
    shards = []
    for number in range(1, num_shards(k3) + 1):
        specs = shard_tensors(k3, number)
        size = sum(math.prod(s.shape) * DTYPES[s.dtype].bits // 8 for s in specs)
        shards.append((shard_name(k3, number), shard_content(k3, number), len(specs), size))
    return Description(
        place=place,
        kind=kind,
        k3=k3,
        counts=count_model(k3),
        dtypes={},
        shards=tuple(shards),
        scales=None,
    )


def _describe_checkpoint(
    place: str, checkpoint: Checkpoint, scales: bool, progress: Progress
) -> Description:
    k3 = read_config(checkpoint.config) if looks_like_k3(checkpoint.config) else None
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in checkpoint.entries.values():
        tensors[entry.dtype] += 1
        sizes[entry.dtype] += entry.length
    shards = []
    for file, header in sorted(checkpoint.headers.items()):
        size = sum(entry.end - entry.begin for entry in header.tensors.values())
        shards.append((file, _content(header.tensors), len(header.tensors), size))
    counts = None
    if k3 is not None:
        packed = any(name.endswith(".weight_packed") for name in checkpoint.entries)
        counts = count_model(k3, packed=packed)
    return Description(
        place=place,
        kind="checkpoint",
        k3=k3,
        counts=counts,
        dtypes={dtype: (n, sizes[dtype]) for dtype, n in sorted(tensors.items())},
        shards=tuple(shards),
        scales=_count_scales(checkpoint, k3, progress) if scales else None,
    )


def _content(names: Mapping[str, Any]) -> str:
    layers = sorted({int(part) for name in names for part in _layer_of(name)})
    if not layers:
        return "no layers"
    return f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"


def _layer_of(name: str) -> list[str]:
    parts = name.split(".")
    return [parts[parts.index("layers") + 1]] if "layers" in parts[:-1] else []


def _count_scales(
    checkpoint: Checkpoint, k3: K3Config | None, progress: Progress
) -> dict[str, dict[int, int]]:
    if k3 is None:
        raise SchemaError(
            f"{checkpoint.source.label}: expected a Kimi-K3 config, got another model's"
        )
    specs = [
        spec
        for layer in k3.moe_layers
        for spec in shard_tensors(k3, layer + 1, packed=True)
        if spec.part == "scale" and spec.name in checkpoint.entries
    ]
    if not specs:
        raise IncompleteError(f"{checkpoint.source.label}: expected E8M0 scales, got none")
    progress.start("scales", sum(checkpoint.entries[spec.name].length for spec in specs), "B")
    totals: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for spec in specs:
        matrix = spec.role.rpartition(".")[2]
        values = checkpoint.read(spec.name)
        found = np.bincount(values, minlength=256)
        totals[matrix] = totals[matrix] + found if matrix in totals else found
        progress.advance(values.nbytes)
    return {
        matrix: {int(byte): int(found[byte]) for byte in np.nonzero(found)[0]}
        for matrix, found in sorted(totals.items())
    }
