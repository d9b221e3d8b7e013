"""Which modules a compressed-tensors config targets: its matching rules, on names alone.

`re:` patterns match at the start of a module's name; other entries are an exact name or, among
targets, the class name `Linear`.

Source: vllm-project/compressed-tensors `utils/match.py`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from k3quant.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class CtMatcher:
    """The targets and ignores of a quantization section.

    Attributes:
        targets: All groups' targets.
        ignore: Patterns and names that are left alone.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def targets_linear(self, module: str) -> bool:
        """Return whether a Linear module of this name is to be quantized."""
        hit = any(entry == "Linear" or matches(entry, module) for entry in self.targets)
        return hit and not any(entry == "Linear" or matches(entry, module) for entry in self.ignore)

    def unused_ignores(self, modules: Iterable[str]) -> list[str]:
        """Return literal ignore entries that name no module; patterns may be for other models."""
        names = set(modules)
        return [e for e in self.ignore if not e.startswith("re:") and e not in names]


def read_matcher(section: Mapping[str, Any]) -> CtMatcher:
    """Read the targets and ignores of a quantization section.

    Raises:
        SchemaError: They are no lists of text, or a pattern does not compile.
    """
    groups = section.get("config_groups", {})
    if not isinstance(groups, Mapping):
        raise SchemaError(f"quantization_config.config_groups: expected an object, got {groups!r}")
    targets: list[str] = []
    for key, group in groups.items():
        found = group.get("targets") if isinstance(group, Mapping) else None
        targets += _names(found, f"config_groups.{key}.targets")
    return CtMatcher(targets=tuple(targets), ignore=tuple(_names(section.get("ignore"), "ignore")))


def matches(entry: str, module: str) -> bool:
    """Return whether one entry names a module."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == module


def tells_digits_apart(matcher: CtMatcher) -> bool:
    """Return whether any entry can treat two names of equal form but other digits differently."""
    return any(re.search(r"\d", entry) for entry in (*matcher.targets, *matcher.ignore))


def _names(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SchemaError(f"quantization_config.{where}: expected a list of text, got {value!r}")
    for entry in value:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise SchemaError(
                    f"quantization_config.{where}: expected a regular expression, got `{entry}` "
                    f"({error})"
                ) from error
    return value
