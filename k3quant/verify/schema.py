"""Names, dtypes and shapes against the table that the config implies.

How a matrix is stored is decided by the tensors that exist; the config's quantization section is
then compared with that.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from typing import Any

from k3quant.errors import SchemaError
from k3quant.models.k3_config import K3Config, looks_like_k3, read_config
from k3quant.models.k3_tensors import (
    TensorSpec,
    accepted_dtypes,
    accepted_shapes,
    num_shards,
    shard_tensors,
)
from k3quant.report import FaultClass, Finding, Severity, fault, finding_of
from k3quant.schemes.storage import (
    ABSENT,
    SUFFIXES,
    Stored,
    mismatches,
    nearest_storage,
    storage_of,
)
from k3quant.verify.quant_section import PLAIN, check_quant_section

_SHOWN = 20
_fault = partial(fault, FaultClass.SCHEMA)
_DIGITS = re.compile(r"\d+")

Tensors = Mapping[str, Stored]
"""Dtype and shape of every tensor of a checkpoint, by name."""


def read_k3_config(config: Mapping[str, Any]) -> tuple[K3Config | None, list[Finding]]:
    """Read the config if it claims to be K3's; say why where it is another model's or refused."""
    if not looks_like_k3(config):
        note = Finding(
            code="other-model",
            fault=FaultClass.SCHEMA,
            severity=Severity.NOTE,
            subject="config.json",
            message="config.json: expected model_type `kimi_k3` or `kimi_linear` for the checks "
            f"of Kimi-K3's table, got `{config.get('model_type')}`; all other checks ran",
        )
        return None, [note]
    try:
        return read_config(config), []
    except SchemaError as error:
        return None, [finding_of(error, subject="config.json", code="config")]


def check_schema(
    config: Mapping[str, Any], k3: K3Config | None, tensors: Tensors, *, lost: Set[str]
) -> list[Finding]:
    """Check every tensor against the table, and the quantization section against the tensors.

    Args:
        config: The parsed config.json.
        k3: The typed config, None where there is no table to check against.
        tensors: All tensors of the checkpoint.
        lost: Tensors of files that are missing or unreadable; that is their own finding.
    """
    if k3 is None:
        return _limited(list(_check_pairs(tensors)))
    table = {
        spec.name: spec
        for shard in range(1, num_shards(k3) + 1)
        for spec in shard_tensors(k3, shard, packed=False)
    }
    plain, grouped, unknown = _sort_tensors(k3, table, tensors)
    findings = list(_check_unknown(table, unknown))
    formats: dict[str, str] = {}
    for module, parts in grouped.items():
        spec = table.get(f"{module}.weight")
        if spec is None or len(spec.shape) != 2:
            findings += _check_direct(k3, table, module, parts)
            continue
        if spec.name in plain:
            parts = {**parts, "weight": tensors[spec.name]}
        storage = storage_of(parts, *spec.shape)
        if storage is None:
            findings += _explain(module, parts, spec)
        else:
            formats[module] = storage.name
    findings += _check_missing(k3, table, plain, grouped, lost)
    stored = formats | {table[name].module: PLAIN for name in plain}
    findings += check_quant_section(config, k3, stored)
    return _limited(findings)


def _sort_tensors(
    k3: K3Config, table: Mapping[str, TensorSpec], tensors: Tensors
) -> tuple[set[str], dict[str, dict[str, Stored]], list[str]]:
    """Tell plainly stored tensors from parts of stored matrices and from unknown names."""
    plain: set[str] = set()
    grouped: dict[str, dict[str, Stored]] = defaultdict(dict)
    unknown: list[str] = []
    for name, (dtype, shape) in tensors.items():
        spec = table.get(name)
        if spec is not None and dtype == spec.dtype and shape == spec.shape:
            plain.add(name)
            continue
        if spec is not None and (
            dtype in accepted_dtypes(k3, spec) and shape in accepted_shapes(k3, spec)
        ):
            plain.add(name)
            continue
        module, _, suffix = name.rpartition(".")
        if spec is not None or (suffix in SUFFIXES and f"{module}.weight" in table):
            grouped[module][suffix] = (dtype, shape)
        else:
            unknown.append(name)
    return plain, grouped, unknown


def _check_direct(
    k3: K3Config, table: Mapping[str, TensorSpec], module: str, parts: Mapping[str, Stored]
) -> Iterator[Finding]:
    for suffix, (dtype, shape) in parts.items():
        name = f"{module}.{suffix}"
        spec = table.get(name)
        if spec is None:
            yield _fault("extra-part", name, f"{name}: expected no such tensor, got {dtype}")
            continue
        dtypes, shapes = accepted_dtypes(k3, spec), accepted_shapes(k3, spec)
        if dtype not in dtypes:
            yield _fault(
                "dtype", name, f"{name}: expected dtype {dtypes[0]}, got {dtype}", dtypes[0], dtype
            )
        if shape not in shapes:
            want = " or ".join(str(list(s)) for s in shapes)
            yield _fault(
                "shape", name, f"{name}: expected shape {want}, got {list(shape)}", want, str(shape)
            )


def _explain(module: str, parts: Mapping[str, Stored], spec: TensorSpec) -> Iterator[Finding]:
    only_weight = set(parts) == {"weight"}
    if only_weight:
        dtype, shape = parts["weight"]
        message = (
            f"{module}.weight: expected {spec.dtype} {list(spec.shape)}, got {dtype} {list(shape)}"
        )
        yield _fault("shape", f"{module}.weight", message, str(list(spec.shape)), str(list(shape)))
        return
    yield from _explain_parts(module, parts, spec.shape)


def _explain_parts(
    module: str, parts: Mapping[str, Stored], shape: tuple[int, ...]
) -> Iterator[Finding]:
    rows, cols = shape
    storage = nearest_storage(parts, rows, cols)
    for suffix, expected, got in mismatches(storage, parts, rows, cols):
        name = f"{module}.{suffix}"
        if got == ABSENT:
            there = ", ".join(sorted(parts))
            message = f"{module}: expected {suffix} beside {there} ({storage.name}), got none"
            yield _fault("missing-part", module, message, suffix, None)
        else:
            message = f"{name}: expected {expected} ({storage.name}), got {got}"
            yield _fault("part", name, message, expected, got)


def _check_missing(
    k3: K3Config,
    table: Mapping[str, TensorSpec],
    plain: set[str],
    grouped: Mapping[str, object],
    lost: Set[str],
) -> Iterator[Finding]:
    excused = grouped.keys() | {name.rpartition(".")[0] for name in lost}
    missing = [
        spec
        for name, spec in table.items()
        if name not in plain and name not in lost and spec.module not in excused
    ]
    by_expert: dict[tuple[int, int], list[TensorSpec]] = defaultdict(list)
    for spec in missing:
        if spec.expert is not None and spec.layer is not None:
            by_expert[spec.layer, spec.expert].append(spec)
        else:
            message = f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, got no such tensor"
            yield _fault("missing-tensor", spec.name, message)
    whole: dict[int, list[int]] = defaultdict(list)
    for (layer, expert), specs in by_expert.items():
        if len(specs) == 3:
            whole[layer].append(expert)
            continue
        for spec in specs:
            message = f"{spec.module}: expected the matrix of expert {expert}, got no such tensor"
            yield _fault("missing-tensor", spec.module, message)
    for layer, experts in sorted(whole.items()):
        have = k3.moe.num_experts
        message = (
            f"layer {layer}: missing experts {experts[:32]}: expected {have}, "
            f"got {have - len(experts)}"
        )
        yield _fault("missing-experts", f"layer {layer}", message, have, have - len(experts))


def _check_unknown(table: Mapping[str, TensorSpec], unknown: list[str]) -> Iterator[Finding]:
    if not unknown:
        return
    kinds = {_DIGITS.sub("#", name) for name in table}
    for name in unknown:
        module, _, suffix = name.rpartition(".")
        logical = f"{module}.weight" if suffix in SUFFIXES else name
        if _DIGITS.sub("#", logical) in kinds:
            message = f"{name}: expected a layer, expert or block of the config, got one beyond it"
            yield _fault("beyond-config", name, message)
        else:
            yield Finding(
                code="unknown-tensor",
                fault=FaultClass.SCHEMA,
                severity=Severity.WARNING,
                subject=name,
                message=f"{name}: expected a tensor of Kimi-K3's table, got an unknown one",
                hint="`convert` refuses it unless `--allow-skip` names it",
            )


def _check_pairs(tensors: Tensors) -> Iterator[Finding]:
    """Check stored matrices on their own, where no table says how large they should be."""
    grouped: dict[str, dict[str, Stored]] = defaultdict(dict)
    for name, stored in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in SUFFIXES:
            grouped[module][suffix] = stored
    for module, parts in grouped.items():
        if set(parts) == {"weight"}:
            continue
        first = "weight_packed" if "weight_packed" in parts else "weight"
        if first not in parts:
            message = f"{module}: expected weight or weight_packed beside {sorted(parts)}, got none"
            yield _fault("missing-part", module, message)
            continue
        dtype, shape = parts[first]
        if len(shape) != 2:
            continue
        per_element = {"weight_packed": 8 if dtype == "I32" else 2}.get(
            first, 2 if dtype == "U8" else 1
        )
        spec_shape = (shape[0], shape[1] * per_element)
        if storage_of(parts, *spec_shape) is None:
            yield from _explain_parts(module, parts, spec_shape)


def _limited(findings: Iterable[Finding]) -> list[Finding]:
    """Keep the first of each kind and count the rest, so that a report stays readable."""
    kept: list[Finding] = []
    seen: dict[str, int] = defaultdict(int)
    last: dict[str, Finding] = {}
    for finding in findings:
        seen[finding.code] += 1
        last[finding.code] = finding
        if seen[finding.code] <= _SHOWN:
            kept.append(finding)
    for code, count in seen.items():
        if count > _SHOWN:
            more = last[code]
            kept.append(
                Finding(
                    code=code,
                    fault=more.fault,
                    severity=more.severity,
                    subject="checkpoint",
                    message=f"and {count - _SHOWN} more findings like the last: {more.message}",
                    got=count,
                )
            )
    return kept
