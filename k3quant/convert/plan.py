"""Planning an export that keeps safetensors files: shard for shard, tensor for tensor.

Each output file has its source's name. Tensors that no rule names keep their bytes; an expert's
tensors lie side by side, as in the release, so that one range still reads one expert.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import INDEX_FILE, encode_index
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.choice import Choice, Format
from k3quant.convert.export_plan import ExportPlan, FilePlan, Forecast, Unit
from k3quant.convert.recipe import Recipe, assign
from k3quant.convert.sidecars import sidecar_files
from k3quant.convert.units import CopyUnit, DenseUnit, ExpertUnit, PackedMatrix
from k3quant.errors import RefusedError, SchemaError, UsageError
from k3quant.formats.dtypes import DTYPES
from k3quant.models.k3_config import K3Config, read_config
from k3quant.models.k3_tensors import (
    TensorSpec,
    accepted_dtypes,
    accepted_shapes,
    num_shards,
    shard_tensors,
)
from k3quant.schemes.compressed_tensors import COMPRESSED_TENSORS
from k3quant.schemes.modelopt import MODELOPT
from k3quant.schemes.scheme import Assignment, Entry, Scheme

SCHEMES = {scheme.name: scheme for scheme in (COMPRESSED_TENSORS, MODELOPT)}

# What loaders stack into one matrix, so that one NVFP4 tensor scale must serve all parts.
FUSED_ROLES: tuple[tuple[str, ...], ...] = (
    ("kda.q_proj", "kda.k_proj", "kda.v_proj", "kda.g_proj", "kda.f_a_proj", "kda.b_proj"),
    ("mla.q_a_proj", "mla.kv_a_proj_with_mqa", "mla.g_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("moe.shared.gate_proj", "moe.shared.up_proj"),
    ("expert.w1", "expert.w3"),
)


@dataclass(frozen=True, slots=True)
class _Module:
    """A weight of the table as it lies in the checkpoint: its parts and their file."""

    spec: TensorSpec
    parts: dict[str, TensorSpec]
    file: str


def plan_export(
    checkpoint: Checkpoint, recipe: Recipe, *, allow_skip: Sequence[str] = ()
) -> ExportPlan:
    """Plan an export.

    Args:
        checkpoint: The source.
        recipe: What becomes of which weight.
        allow_skip: Regular expressions of tensors that may be left out.

    Raises:
        UsageError: The scheme is unknown, or cannot spell a format.
        SchemaError: The source is no Kimi-K3, or the recipe does not fit it.
        RefusedError: A source tensor is unknown and not named in `allow_skip`.
    """
    scheme = SCHEMES.get(recipe.scheme)
    if scheme is None:
        raise UsageError(f"--scheme: expected one of {sorted(SCHEMES)}, got `{recipe.scheme}`")
    k3 = read_config(checkpoint.config)
    assignment = assign(recipe, k3)
    for choice in assignment.values():
        if choice.format not in scheme.formats:
            known = ", ".join(sorted(scheme.formats))
            raise UsageError(
                f"--scheme {scheme.name}: expected one of {known}, got `{choice.format}`"
            )
    modules, skipped = _locate(checkpoint, k3, allow_skip)
    files = _plan_files(checkpoint, scheme, assignment, modules)
    mxfp4 = Choice(format=Format.MXFP4)
    stored = {module.spec.module: mxfp4 for module in modules if "packed" in module.parts}
    documents = {
        name: (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
        for name, document in scheme.documents(
            checkpoint.config, k3, {**stored, **assignment}
        ).items()
    }
    weight_map = {name: file.name for file in files for name in file.places}
    total = sum(end - begin for file in files for begin, end in file.places.values())
    documents[INDEX_FILE] = encode_index(weight_map, total)
    return ExportPlan(
        target=recipe.name,
        scheme=scheme.name,
        files=files,
        documents=documents,
        sidecars=tuple(sidecar_files(checkpoint, replaced=documents)),
        skipped=skipped,
        forecasts=tuple(_forecast(checkpoint, scheme, assignment, modules)),
    )


def _locate(
    checkpoint: Checkpoint, k3: K3Config, allow_skip: Sequence[str]
) -> tuple[list[_Module], dict[str, str]]:
    """Find every weight of the table in the checkpoint, and say what else is there."""
    packed = any(name.endswith(".weight_packed") for name in checkpoint.entries)
    by_module: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for shard in range(1, num_shards(k3) + 1):
        for spec in shard_tensors(k3, shard, packed=packed):
            entry = checkpoint.entries.get(spec.name)
            if entry is None:
                raise SchemaError(
                    f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, got no such tensor",
                    hint="`k3quant verify` lists every fault; convert reads plain or MXFP4 weights",
                )
            dtypes, shapes = accepted_dtypes(k3, spec), accepted_shapes(k3, spec)
            if entry.dtype not in dtypes or entry.shape not in shapes:
                raise SchemaError(
                    f"{spec.name}: expected {dtypes[0]} {list(shapes[0])}, got {entry.dtype} "
                    f"{list(entry.shape)}",
                    hint="convert reads the release's storage: plain floats or MXFP4",
                )
            key = spec.module if spec.part != "weight" else spec.name
            by_module[key][spec.part] = spec
    known = {spec.name for parts in by_module.values() for spec in parts.values()}
    skipped: dict[str, str] = {}
    for name in checkpoint.entries.keys() - known:
        if not any(re.fullmatch(pattern, name) for pattern in allow_skip):
            raise RefusedError(
                f"{name}: expected only tensors of Kimi-K3's table, got an unknown one",
                hint="`--allow-skip PATTERN` leaves it out and records that",
            )
        skipped[name] = "unknown to Kimi-K3's table, skipped by --allow-skip"
    modules = []
    for parts in by_module.values():
        first = next(iter(parts.values()))
        home = parts.get("packed", first)
        modules.append(_Module(first, parts, checkpoint.entries[home.name].file))
    return modules, skipped


def _plan_files(
    checkpoint: Checkpoint, scheme: Scheme, assignment: Assignment, modules: list[_Module]
) -> tuple[FilePlan, ...]:
    by_file: dict[str, list[_Module]] = defaultdict(list)
    partners: dict[tuple[object, ...], list[_Module]] = defaultdict(list)
    for module in modules:
        by_file[module.file].append(module)
        partners[_partner_key(module, assignment)].append(module)
    plans = []
    for file in sorted(checkpoint.headers):
        entries: list[Entry] = []
        units: list[Unit] = []
        done: set[tuple[object, ...]] = set()
        for module in sorted(by_file[file], key=_file_order):
            key = _partner_key(module, assignment)
            if key in done:
                continue
            done.add(key)
            unit, made = _unit(checkpoint, scheme, assignment, partners[key], file)
            units.append(unit)
            entries += made
        aligned = _is_aligned(entries)
        header, placed = encode_header(entries, keep_order=aligned)
        start = len(header)
        places = {name: (start + e.begin, start + e.end) for name, e in placed.items()}
        size = max((end for _, end in places.values()), default=start)
        plans.append(
            FilePlan(name=file, header=header, places=places, file_bytes=size, units=tuple(units))
        )
    return tuple(plans)


def _file_order(module: _Module) -> tuple[object, ...]:
    """Order as released: what is no expert by width of dtype and name, then expert by expert."""
    spec = module.spec
    if spec.expert is None:
        return (0, -DTYPES[spec.dtype].rank, spec.name, "")
    return (1, 0, str(spec.expert), spec.name)


def _partner_key(module: _Module, assignment: Assignment) -> tuple[object, ...]:
    """Return what is equal for weights that are converted together."""
    spec = module.spec
    choice = assignment.get(spec.module)
    if spec.expert is not None and "packed" in module.parts:
        return ("expert", spec.layer, spec.expert)
    if choice is not None and choice.format is Format.NVFP4:
        for number, roles in enumerate(FUSED_ROLES):
            if spec.role in roles:
                return ("fused", spec.layer, spec.expert, number)
    return ("alone", spec.name)


def _unit(
    checkpoint: Checkpoint,
    scheme: Scheme,
    assignment: Assignment,
    together: list[_Module],
    file: str,
) -> tuple[Unit, list[Entry]]:
    first = together[0].spec
    here = tuple(i for i, module in enumerate(together) if module.file == file)
    choice = assignment.get(first.module)
    if "packed" in together[0].parts:
        return _expert_unit(scheme, assignment, together, here)
    if choice is None:
        (module,) = together
        spec, entry = module.spec, checkpoint.entries[module.spec.name]
        unit = CopyUnit(name=spec.name, family=spec.family.value, dtype=entry.dtype)
        return unit, [(spec.name, entry.dtype, entry.shape)]
    dense = DenseUnit(
        label=first.module,
        names=tuple(module.spec.name for module in together),
        modules=tuple(module.spec.module for module in together),
        written=here,
        family=first.family.value,
        choice=choice,
        scheme=scheme,
    )
    entries = [e for i in here for e in _entries_of(scheme, choice, together[i])]
    return dense, entries


def _expert_unit(
    scheme: Scheme, assignment: Assignment, together: list[_Module], here: tuple[int, ...]
) -> tuple[Unit, list[Entry]]:
    first = together[0].spec
    keep = Choice(format=Format.KEEP)
    matrices = tuple(
        PackedMatrix(
            module=module.spec.module,
            packed=module.parts["packed"].name,
            scale=module.parts["scale"].name,
            choice=assignment.get(module.spec.module, keep),
        )
        for module in together
    )
    roles = [module.spec.role for module in together]
    fused = tuple(i for i, role in enumerate(roles) if role in FUSED_ROLES[-1])
    alone = tuple((i,) for i in range(len(roles)) if i not in fused)
    unit = ExpertUnit(
        family=first.family.value,
        matrices=matrices,
        written=here,
        shared=(fused, *alone),
        scheme=scheme,
    )
    entries = [e for i in here for e in _entries_of(scheme, matrices[i].choice, together[i])]
    return unit, entries


def _entries_of(scheme: Scheme, choice: Choice, module: _Module) -> list[Entry]:
    packed = module.parts.get("packed")
    if choice.format is Format.KEEP:
        choice = Choice(format=Format.MXFP4)
    rows, cols = module.spec.shape if packed is None else (packed.shape[0], packed.shape[1] * 2)
    if packed is not None and choice.format is Format.MXFP4:
        # The bytes stay as they are, so does their name in every scheme.
        scheme = COMPRESSED_TENSORS
    made = scheme.entries(choice, module.spec.module, rows, cols)
    # Within a module wide dtypes go first, which keeps them aligned.
    return sorted(made, key=lambda entry: (-DTYPES[entry[1]].bits, entry[0]))


def _is_aligned(entries: Iterable[Entry]) -> bool:
    offset = 0
    for _, dtype, shape in entries:
        width = DTYPES[dtype].bits
        if offset * 8 % width:
            return False
        offset += DTYPES[dtype].byte_count(math.prod(shape))
    return True


def _forecast(
    checkpoint: Checkpoint, scheme: Scheme, assignment: Assignment, modules: list[_Module]
) -> list[Forecast]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for module in modules:
        choice = assignment.get(module.spec.module)
        source = sum(checkpoint.entries[spec.name].length for spec in module.parts.values())
        target, size = "keep", source
        if choice is not None:
            target = choice.format.value
            size = sum(
                DTYPES[dtype].byte_count(math.prod(shape))
                for _, dtype, shape in _entries_of(scheme, choice, module)
            )
        total = sums[module.spec.family.value, target]
        total[0] += 1
        total[1] += source
        total[2] += size
    return [
        Forecast(family=family, target=target, tensors=n, source_bytes=a, target_bytes=b)
        for (family, target), (n, a, b) in sorted(sums.items())
    ]
