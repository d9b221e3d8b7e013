"""A cut: some layers and experts of a checkpoint as a smaller one that is whole in itself.

Layers and experts are counted anew from 0; embedding, final norms, head and vision stay. The
router keeps the rows of the experts that stay. The model computes something else than the whole
one, but every tensor in it is bit for bit a tensor, or rows of a tensor, of the source.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from k3quant.checkpoint.reader import TensorEntry
from k3quant.errors import SchemaError, UsageError
from k3quant.models.k3_config import K3Config, read_config
from k3quant.models.k3_tensors import TensorSpec, num_shards, shard_tensors
from k3quant.repack.settings import Span

CUT_FILE = "k3quant.cut.json"
_CUT_ROLES = frozenset({"moe.gate", "moe.bias"})  # one row or entry an expert


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A planned cut.

    Attributes:
        layers: First and last layer of the source that stay.
        experts: First and last expert of each layer that stay.
        source: Config of the source.
        result: Config of the cut.
        config: The cut's config.json.
        changes: Old and new value of each key that changed.
    """

    layers: Span
    experts: Span
    source: K3Config
    result: K3Config
    config: dict[str, Any]
    changes: dict[str, list[Any]]

    def record(self, source: str, previous: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what `k3quant.cut.json` says about the cut.

        Args:
            source: How people name the source.
            previous: The record of the cut that the source itself was, None if it was none.
        """
        return {
            "source": source,
            "layers": list(self.layers),
            "experts": list(self.experts),
            "source_layers": self.source.num_hidden_layers,
            "source_experts": self.source.moe.num_experts,
            "config_changes": self.changes,
            "previous": previous,
        }


class CutTensor(NamedTuple):
    """One tensor of a cut and where it comes from.

    Attributes:
        source: The source's tensor.
        result: The cut's tensor.
        first_row: First row of the source that it takes; it takes all where the shapes agree.
    """

    source: TensorSpec
    result: TensorSpec
    first_row: int


def plan_cut(config: Mapping[str, Any], *, layers: Span | None, experts: Span | None) -> Cut:
    """Write the config of a cut.

    Args:
        config: The source's config.json.
        layers: First and last layer that stay, None for all.
        experts: First and last expert that stay, None for all.

    Raises:
        UsageError: A range reaches beyond the model, or the layers cannot be counted anew without
            changing their kind or where attention-residual blocks begin.
        SchemaError: The config is not Kimi-K3's, or names layers by number.
    """
    source = read_config(config)
    first, last = layers or (0, source.num_hidden_layers - 1)
    first_expert, last_expert = experts or (0, source.moe.num_experts - 1)
    _check_ranges(source, (first, last), (first_expert, last_expert))
    changes: dict[str, list[Any]] = {}
    new = copy.deepcopy(dict(config))
    text = new if source.flat else new["text_config"]
    _change(text, changes, "num_hidden_layers", last - first + 1)
    dense = min(max(source.first_k_dense_replace - first, 0), last - first + 1)
    _change(text, changes, "first_k_dense_replace", dense)
    linear = text["linear_attn_config"]
    for key in ("kda_layers", "full_attn_layers"):
        kept = [number - first for number in linear[key] if first < number <= last + 1]
        _change(linear, changes, key, kept)
    kept_experts = last_expert - first_expert + 1
    groups = max(kept_experts * source.moe.num_expert_group // source.moe.num_experts, 1)
    top_groups = min(source.moe.topk_group, groups)
    _change(text, changes, "num_experts", kept_experts)
    _change(text, changes, "num_expert_group", groups)
    _change(text, changes, "topk_group", top_groups)
    reachable = kept_experts // groups * top_groups
    top_k = min(source.moe.num_experts_per_token, reachable)
    _change(text, changes, "num_experts_per_token", top_k)
    result = read_config(new)
    for layer in range(result.num_hidden_layers):
        if result.is_moe(layer) != source.is_moe(layer + first):
            raise UsageError(
                f"layers: expected a range that starts at a multiple of moe_layer_freq "
                f"{source.moe_layer_freq}, got {first}-{last}"
            )
    cut = Cut(
        layers=(first, last),
        experts=(first_expert, last_expert),
        source=source,
        result=result,
        config=new,
        changes=changes,
    )
    _check_ignore_lists(config, cut)
    return cut


def cut_tensors(cut: Cut, *, packed: bool | None = None) -> Iterator[CutTensor]:
    """Yield every tensor that a cut's table has, with the source tensor it comes from.

    Args:
        cut: The cut.
        packed: Whether routed experts are MXFP4 pairs; None takes the config's word.
    """
    first_layer, first_expert = cut.layers[0], cut.experts[0]
    beyond = num_shards(cut.source) - num_shards(cut.result)
    for shard in range(1, num_shards(cut.result) + 1):
        in_layers = shard <= cut.result.num_hidden_layers
        source_shard = shard + (first_layer if in_layers else beyond)
        by_place = {
            (spec.role, spec.part, spec.expert, None if in_layers else spec.layer): spec
            for spec in shard_tensors(cut.source, source_shard, packed=packed)
        }
        for spec in shard_tensors(cut.result, shard, packed=packed):
            expert = None if spec.expert is None else spec.expert + first_expert
            place = (spec.role, spec.part, expert, None if in_layers else spec.layer)
            rows = first_expert if spec.role in _CUT_ROLES else 0
            yield CutTensor(by_place[place], spec, rows)


def cut_entries(cut: Cut, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a cut by their new names, each with the range it takes.

    Tensors that belong to a module of the table under another spelling, as in converted
    checkpoints, move with their module.

    Args:
        cut: The cut.
        entries: Every tensor of the source.

    Raises:
        SchemaError: A tensor belongs to no module of the table, or the router is not stored as one
            row an expert.
    """
    kept: dict[str, tuple[str, int | None]] = {}
    modules: dict[str, str] = {}
    for source, result, first_row in cut_tensors(cut):
        is_cut = source.role in _CUT_ROLES
        kept[source.name] = (result.name, first_row if is_cut else None)
        modules[source.module] = "" if is_cut else result.module
    known = {
        spec.module
        for shard in range(1, num_shards(cut.source) + 1)
        for spec in shard_tensors(cut.source, shard)
    }
    result_entries: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if (exact := kept.get(name)) is not None:
            new_name, row = exact
            result_entries[new_name] = entry if row is None else _rows(cut, name, entry)
        elif target := modules.get(module):
            result_entries[f"{target}.{leaf}"] = entry
        elif module not in known or module in modules:
            raise SchemaError(
                f"tensor {name}: expected only tensors that a cut knows how to divide, got one "
                "outside the table"
            )
    return result_entries


def _rows(cut: Cut, name: str, entry: TensorEntry) -> TensorEntry:
    total = cut.source.moe.num_experts
    if not entry.shape or entry.shape[0] != total:
        raise SchemaError(
            f"tensor {name}: expected one row for each of {total} experts, got shape "
            f"{list(entry.shape)}"
        )
    first, last = cut.experts
    row_bytes = entry.length // total
    count = last - first + 1
    return entry._replace(
        shape=(count, *entry.shape[1:]),
        offset=entry.offset + first * row_bytes,
        length=count * row_bytes,
    )


def _change(section: dict[str, Any], changes: dict[str, list[Any]], key: str, value: Any) -> None:
    if section[key] != value:
        changes[key] = [section[key], value]
        section[key] = value


def _check_ranges(source: K3Config, layers: Span, experts: Span) -> None:
    for what, (first, last), count in (
        ("layers", layers, source.num_hidden_layers),
        ("experts", experts, source.moe.num_experts),
    ):
        if last >= count:
            raise UsageError(f"{what}: expected a range within 0-{count - 1}, got {first}-{last}")
    first, last = layers
    block = source.attn_res_block_size
    if block is not None and first % block and first // block != last // block:
        start = first // block * block
        raise UsageError(
            f"layers: expected a range that begins with an attention-residual block of {block} "
            f"layers or stays within one, got {first}-{last}",
            hint=f"blocks would begin at other layers; `{start}-{last}`, "
            f"`{first}-{start + block - 1}` or `{start + block}-{last}` keep them",
        )
    size = source.moe.num_experts // source.moe.num_expert_group
    first, last = experts
    if source.moe.num_expert_group > 1 and (first % size or (last + 1) % size):
        raise UsageError(f"experts: expected whole groups of {size} experts, got {first}-{last}")


def _check_ignore_lists(config: Mapping[str, Any], cut: Cut) -> None:
    """Refuse lists of unquantized modules that would mean others after counting anew."""
    moved = _moved_modules(cut)
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        quantization = section.get("quantization_config")
        ignore = quantization.get("ignore") if isinstance(quantization, Mapping) else None
        for entry in ignore if isinstance(ignore, list) else ():
            if not isinstance(entry, str):
                continue
            for old, new in moved:
                if _matches(entry, old) != _matches(entry, new):
                    raise SchemaError(
                        f"quantization_config.ignore: expected entries that hold after layers and "
                        f"experts are counted anew, got `{entry}`",
                        hint="it names a layer or an expert by number; cut before quantizing",
                    )


def _moved_modules(cut: Cut) -> list[tuple[str, str]]:
    pairs = dict.fromkeys(
        (tensor.source.module, tensor.result.module) for tensor in cut_tensors(cut)
    )
    return [(old, new) for old, new in pairs if old != new]


def _matches(entry: str, module: str) -> bool:
    # Source: compressed-tensors, `utils/match.py`: `re:` entries match from the start of a name.
    if not entry.startswith("re:"):
        return entry == module
    try:
        return re.match(entry[3:], module) is not None
    except re.error as error:
        raise SchemaError(
            f"quantization_config.ignore: expected regular expressions, got `{entry}` ({error})"
        ) from error
