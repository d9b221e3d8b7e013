"""The config's quantization section against what the files hold."""

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from k3quant.errors import SchemaError
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import Family, num_shards, shard_tensors
from k3quant.report import FaultClass, Finding, Severity, fault, finding_of
from k3quant.schemes.ct_match import CtMatcher, read_matcher, tells_digits_apart

# The released section misses these unquantized Linear modules: 371 of the released model.
KNOWN_MISSES = frozenset(
    {
        "self_attention_res_proj",
        "mlp_res_proj",
        "output_attn_res_proj",
        "moe.latent_down",
        "moe.latent_up",
    }
)
PLAIN = "plain"
_fault = partial(fault, FaultClass.SCHEMA)
# Two-dimensional weights that are no Linear module in the vendor's code.
_NOT_LINEAR = frozenset({"embed_tokens", "moe.gate"})


@dataclass(frozen=True, slots=True)
class LinearModules:
    """Linear modules that a section cannot tell apart: one name for all, and how many they are."""

    module: str
    role: str
    family: Family
    count: int


def linear_modules(k3: K3Config, *, one_by_one: bool) -> list[LinearModules]:
    """Return the Linear modules of a config, one by one or by the form of their name."""
    groups: dict[str, list[Any]] = {}
    for shard, times in _shards(k3, one_by_one=one_by_one):
        for spec in shard_tensors(k3, shard, packed=False):
            if len(spec.shape) != 2 or spec.role in _NOT_LINEAR:
                continue
            form = spec.module if one_by_one else _form(spec.module)
            group = groups.setdefault(form, [spec, 0])
            group[1] += times
    return [LinearModules(s.module, s.role, s.family, n) for s, n in groups.values()]


def _shards(k3: K3Config, *, one_by_one: bool) -> list[tuple[int, int]]:
    """Return shards to look at, and for how many of the same content each stands."""
    if one_by_one:
        return [(shard, 1) for shard in range(1, num_shards(k3) + 1)]
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for shard in range(1, num_shards(k3) + 1):
        layer = shard - 1
        key: tuple[object, ...] = (shard,)
        if layer < k3.num_hidden_layers:
            key = (k3.layer_kinds[layer], k3.is_moe(layer), len(str(layer)))
        alike[key].append(shard)
    return [(shards[0], len(shards)) for shards in alike.values()]


def quant_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section as loaders find it: top level first, then `text_config`."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "quantization"):
            if isinstance(place.get(key), Mapping):
                section: Mapping[str, Any] = place[key]
                return section
    return None


def check_quant_section(
    config: Mapping[str, Any], k3: K3Config, stored: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield disagreements between the section and the storage of each module.

    Args:
        config: The parsed config.json.
        k3: The typed config.
        stored: Storage form of every module that is there, `PLAIN` for whole tensors.
    """
    matcher = yield from _read_section(config, stored)
    if matcher is None:
        return
    modules = linear_modules(k3, one_by_one=False)
    if tells_digits_apart(matcher) or not _stored_alike(modules, stored):
        modules = linear_modules(k3, one_by_one=True)
    yield from _compare(matcher, modules, stored)


def check_released_section(config: Mapping[str, Any], k3: K3Config) -> Iterator[Finding]:
    """Yield disagreements between the section and files in the layout that the config predicts."""
    modules = linear_modules(k3, one_by_one=False)
    matcher = yield from _read_section(config, _released_storage(k3, modules))
    if matcher is None:
        return
    if tells_digits_apart(matcher):
        modules = linear_modules(k3, one_by_one=True)
    yield from _compare(matcher, modules, _released_storage(k3, modules))


def _released_storage(k3: K3Config, modules: list[LinearModules]) -> dict[str, str]:
    packed = k3.packed_experts
    return {
        group.module: "mxfp4" if packed and group.family is Family.ROUTED_EXPERTS else PLAIN
        for group in modules
    }


def _read_section(
    config: Mapping[str, Any], stored: Mapping[str, str]
) -> Generator[Finding, None, CtMatcher | None]:
    """Yield what is wrong with the section itself; return its targets where it has any."""
    section = quant_section(config)
    if section is None:
        packed = {module: name for module, name in stored.items() if name != PLAIN}
        if packed:
            module, name = next(iter(packed.items()))
            message = (
                f"config.json: expected a quantization section, got none: {len(packed)} modules "
                f"are quantized, such as {module} ({name})"
            )
            yield _fault("no-quant-section", "config.json", message)
        return None
    if section.get("quant_method") != "compressed-tensors":
        return None
    try:
        return read_matcher(section)
    except SchemaError as error:
        yield finding_of(error, subject="config.json", code="quant-section")
        return None


def _compare(
    matcher: CtMatcher, modules: list[LinearModules], stored: Mapping[str, str]
) -> Iterator[Finding]:
    known = 0
    for group in modules:
        form = stored.get(group.module)
        if form is None:  # missing or malformed, which is its own finding
            continue
        targeted = matcher.targets_linear(group.module)
        if form != PLAIN and not targeted:
            message = f"{group.module}: ignored by config, packed in file ({form})"
            yield _fault("ignored-but-packed", group.module, f"{message}, {group.count} modules")
        elif form == PLAIN and targeted and group.role in KNOWN_MISSES:
            known += group.count
        elif form == PLAIN and targeted:
            message = f"{group.module}: quantized by config, stored plainly in file"
            yield _fault("targeted-but-plain", group.module, f"{message}, {group.count} modules")
    if known:
        yield Finding(
            code="released-ignore-list",
            fault=FaultClass.SCHEMA,
            severity=Severity.NOTE,
            subject="config.json",
            message=f"config.json: expected the ignore list to name every unquantized Linear, got "
            f"{known} missed (residual mixes and latent projections), as released",
            got=known,
            hint="loaders that trust the list mis-target them; decide by the tensors that exist",
        )
    for entry in matcher.unused_ignores(group.module for group in modules):
        yield Finding(
            code="ignore-matches-nothing",
            fault=FaultClass.SCHEMA,
            severity=Severity.WARNING,
            subject="config.json",
            message=f"config.json: expected ignore entries that name a module, got `{entry}`",
        )


def _stored_alike(modules: list[LinearModules], stored: Mapping[str, str]) -> bool:
    """Return whether modules whose names differ in digits alone are all stored in one way."""
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for module, form in stored.items():
        forms[_form(module)][form] += 1
    return all(list(forms[_form(g.module)].values()) == [g.count] for g in modules)


def _form(module: str) -> str:
    return re.sub(r"\d", "0", module)
