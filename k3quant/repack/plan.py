"""The plan of a repack: which files come out, and which ranges of the source make them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from k3quant.checkpoint.folder import LocalFolder, Source
from k3quant.checkpoint.index import INDEX_FILE, encode_index
from k3quant.checkpoint.reader import CONFIG_FILE, Checkpoint, TensorEntry, open_checkpoint
from k3quant.checkpoint.shards import (
    ShardFile,
    ShardPlan,
    plan_by_home,
    plan_by_layer,
    plan_by_rank,
    plan_by_size,
)
from k3quant.errors import SchemaError
from k3quant.models.k3_config import K3Config, looks_like_k3, read_config
from k3quant.repack.cut import CUT_FILE, Cut, cut_entries, plan_cut
from k3quant.repack.places import items_by_file, place_tensors
from k3quant.repack.ranges import PlannedHeader, find_links, lay_out, merge_metadata
from k3quant.repack.rebuild import index_from_headers
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.repack.sidecars import Sidecars, sort_sidecars
from k3quant.report import FaultClass, Finding, Report, Severity
from k3quant.sizes import format_size

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class RepackPlan:
    """What a repack will write.

    Attributes:
        settings: What was asked for.
        checkpoint: The source.
        entries: Range of each output tensor in the source.
        shards: The outputs' layout.
        cut: The cut, None where everything stays.
        linked: Source file of each output that stays byte for byte what it is, where links are
            asked for.
        sidecars: Files that are neither shard nor index.
        warnings: What a person should know.
    """

    settings: RepackSettings
    checkpoint: Checkpoint
    entries: Mapping[str, TensorEntry]
    shards: ShardPlan
    cut: Cut | None
    linked: Mapping[str, str]
    sidecars: Sidecars
    warnings: tuple[Finding, ...]

    def header(self, shard: ShardFile) -> PlannedHeader:
        """Lay out one output: its header and its ranges of the source, joined where they touch."""
        return lay_out(shard, self.entries, self.checkpoint, self.settings.align)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each output, and with them `num_ranges`."""
        return {file: size for file, (size, _) in self._measured.items()}

    @cached_property
    def num_ranges(self) -> int:
        """Ranges that are copied, those that touch counted once."""
        return sum(n for file, (_, n) in self._measured.items() if file not in self.linked)

    @cached_property
    def _measured(self) -> Mapping[str, tuple[int, int]]:
        measured: dict[str, tuple[int, int]] = {}
        for shard in self.shards.files:
            header, places, ranges = self.header(shard)
            size = len(header) + max((entry.end for entry in places.values()), default=0)
            measured[shard.file] = size, len(ranges)
        return measured

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.length for entry in self.entries.values())

    @property
    def bytes_to_copy(self) -> int:
        """Bytes of the outputs that are not linked."""
        return sum(size for file, size in self.sizes.items() if file not in self.linked)

    @property
    def index_bytes(self) -> int:
        """Bytes of all indexes, within a few of each."""
        entries = {
            shard.file: sum(len(item.name) + len(shard.file) + 12 for item in shard.items)
            for shard in self.shards.files
        }
        return sum(sum(entries[f] for f in held) for held in self.shards.indexes.values()) + sum(
            entries.values()
        )

    def index_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of every index, the overall one last."""
        files = {shard.file: shard for shard in self.shards.files}
        for index, held in self.shards.indexes.items():
            yield index, _index_of([files[file] for file in held])
        yield INDEX_FILE, _index_of(list(self.shards.files))

    def rewritten(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of the sidecars that a cut rewrites."""
        if self.cut is None:
            return
        source = self.checkpoint.source
        info = source.files.get(CUT_FILE)
        previous = json.loads(source.read(CUT_FILE, 0, info.size)) if info else None
        record = self.cut.record(Path(source.label).name, previous)
        for file, document in ((CONFIG_FILE, self.cut.config), (CUT_FILE, record)):
            # Without a final newline, as the release's config.json is.
            yield file, json.dumps(document, indent=2, ensure_ascii=False).encode()

    def summary(self) -> dict[str, Any]:
        """Return the plan's numbers."""
        return {
            "source": self.checkpoint.source.label,
            "layout": str(self.settings.chosen_layout),
            "tensors": len(self.entries),
            "tensor_bytes": self.tensor_bytes,
            "files": len(self.shards.files),
            "file_bytes": sum(self.sizes.values()),
            "bytes_to_copy": self.bytes_to_copy,
            "ranges": self.num_ranges,
            "linked_files": len(self.linked),
            "indexes": len(self.shards.indexes) + 1,
            "sidecars": list(self.sidecars.copied),
            "skipped": list(self.sidecars.skipped),
        }

    def report(self) -> Report:
        """Return the plan as a report; its warnings never decide the exit code."""
        return Report(command="repack", findings=self.warnings, summary=self.summary())


def plan_repack(source: Path | Source, settings: RepackSettings) -> RepackPlan:
    """Plan a repack without writing anything.

    Args:
        source: The checkpoint's folder, or its files.
        settings: What is asked for.

    Raises:
        IncompleteError: The source lacks files.
        StructureError: Its headers or its index are malformed or disagree.
        SchemaError: Its config is not one that the layout or the cut needs.
        UsageError: The cut or the number of ranks does not fit the model.
    """
    checkpoint = open_source(source, settings)
    cut = None
    entries = checkpoint.entries
    if settings.is_cut:
        cut = plan_cut(checkpoint.config, layers=settings.layers, experts=settings.experts)
        entries = cut_entries(cut, entries)
    shards, warnings = _plan_shards(checkpoint, entries, settings, cut)
    sidecars = sort_sidecars(
        checkpoint.source,
        checkpoint.headers.keys(),
        rewritten=(CONFIG_FILE, CUT_FILE) if cut else (),
    )
    may_link = settings.link or settings.in_place
    return RepackPlan(
        settings=settings,
        checkpoint=checkpoint,
        entries=entries,
        shards=shards,
        cut=cut,
        linked=find_links(shards.files, entries, checkpoint, settings.align) if may_link else {},
        sidecars=sidecars,
        warnings=(*warnings, *_differing_metadata(checkpoint), *sidecars.warnings),
    )


def open_source(source: Path | Source, settings: RepackSettings) -> Checkpoint:
    """Open the source, by its index or by its files' headers as the settings say."""
    place = LocalFolder(source) if isinstance(source, Path) else source
    return open_checkpoint(index_from_headers(place).place if settings.rebuild_index else place)


def _plan_shards(
    checkpoint: Checkpoint,
    entries: Mapping[str, TensorEntry],
    settings: RepackSettings,
    cut: Cut | None,
) -> tuple[ShardPlan, list[Finding]]:
    layout, limit = settings.chosen_layout, settings.file_limit
    if layout is Layout.KEEP:
        return plan_by_home(items_by_file(entries.items())), []
    k3 = cut.result if cut else _config_of(checkpoint, needed=layout is not Layout.SIZE)
    unknown: list[str] = []
    if k3 is None:
        items = items_by_file(entries.items())
    else:
        items, unknown = place_tensors(entries, k3)
    metadata, _ = merge_metadata([header.metadata for header in checkpoint.headers.values()])
    overhead = 16 + settings.align + len(json.dumps(metadata, ensure_ascii=False).encode())
    if layout is Layout.ORIGINAL:
        shards = plan_by_home(items)
    elif layout is Layout.LAYER:
        shards = plan_by_layer(items, limit=limit, overhead=overhead)
    elif layout is Layout.RANK:
        assert k3 is not None
        assert settings.ranks is not None
        assert limit is not None
        num_experts = k3.moe.num_experts
        shards = plan_by_rank(
            items, num_experts=num_experts, ranks=settings.ranks, limit=limit, overhead=overhead
        )
    else:
        shards = plan_by_size(items, limit=limit, overhead=overhead)
    if layout is Layout.SIZE:
        unknown = []  # no file by size claims to hold a layer
    return shards, [*_unknown(unknown), *_oversized(shards, limit)]


def _config_of(checkpoint: Checkpoint, *, needed: bool) -> K3Config | None:
    if needed:
        return read_config(checkpoint.config)
    # Files by size need no table; with one, layers and experts stay together.
    if not looks_like_k3(checkpoint.config):
        return None
    try:
        return read_config(checkpoint.config)
    except SchemaError:
        return None


def _differing_metadata(checkpoint: Checkpoint) -> list[Finding]:
    _, differing = merge_metadata(header.metadata for header in checkpoint.headers.values())
    return [
        _warning(
            "metadata",
            f"`__metadata__`: expected one value of `{key}` in all shards, got several; it stays "
            "only in files whose tensors come from shards that agree",
        )
        for key in sorted(differing)
    ]


def _unknown(names: list[str]) -> list[Finding]:
    if not names:
        return []
    return [
        _warning(
            "unknown-tensors",
            f"{len(names)} tensors: expected only tensors of the table, got "
            f"{', '.join(sorted(names)[:_SHOWN])}; they go with the globals",
        )
    ]


def _oversized(shards: ShardPlan, limit: int | None) -> list[Finding]:
    if not shards.oversized:
        return []
    assert limit is not None
    largest = max(shards.oversized, key=lambda item: item.size)
    return [
        _warning(
            "oversized-tensors",
            f"{len(shards.oversized)} tensors: expected at most {format_size(limit)} a file with "
            f"its header, got up to {format_size(largest.size)} ({largest.name}); each has a file "
            "of its own",
        )
    ]


def _index_of(shards: list[ShardFile]) -> bytes:
    weight_map = {item.name: shard.file for shard in shards for item in shard.items}
    return encode_index(weight_map, sum(item.size for shard in shards for item in shard.items))


def _warning(code: str, message: str) -> Finding:
    return Finding(
        code=code,
        fault=FaultClass.STRUCTURE,
        severity=Severity.WARNING,
        subject=message.partition(":")[0],
        message=message,
    )
