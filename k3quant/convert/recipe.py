"""Recipes: ordered rules that give weights a format, read from TOML or built from `--to`.

A rule that matches nothing and a weight that two rules match are refused: a recipe says what it
means, or it does not run. Weights that no rule names are kept.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from k3quant.convert.choice import Choice, Format, encoded_parts
from k3quant.errors import SchemaError, UsageError
from k3quant.formats.mx import ScaleRounding
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import Family, TensorSpec, num_shards, shard_tensors
from k3quant.schemes.scheme import Assignment

_ENDS = ".recipe.toml"
_KEYS = frozenset(
    {
        "families",
        "roles",
        "layers",
        "experts",
        "pattern",
        "format",
        "rounding",
        "group_size",
        "ragged",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which weights, and what they become; an empty condition matches all.

    Attributes:
        families: Families of the table.
        roles: Roles of the table, such as `kda.b_proj`.
        layers: First and last layer, 0-based.
        experts: First and last routed expert.
        pattern: Regular expression over the module's whole name.
        choice: The format.
    """

    families: tuple[Family, ...] = ()
    roles: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    pattern: str | None = None
    choice: Choice

    def matches(self, spec: TensorSpec) -> bool:
        """Return whether a weight of the table meets every condition."""
        return (
            (not self.families or spec.family in self.families)
            and (not self.roles or spec.role in self.roles)
            and _within(spec.layer, self.layers)
            and _within(spec.expert, self.experts)
            and (self.pattern is None or re.fullmatch(self.pattern, spec.module) is not None)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named list of rules; `scheme` is the spelling it was made for."""

    name: str
    scheme: str
    rules: tuple[Rule, ...]


def recipe_for(target: str, *, scheme: str, rounding: ScaleRounding, group_size: int) -> Recipe:
    """Return the recipe behind `--to`: routed experts in one format, everything else kept.

    Raises:
        UsageError: There is no such format.
    """
    if target not in {form.value for form in Format} - {Format.KEEP}:
        names = ", ".join(form.value for form in Format if form is not Format.KEEP)
        raise UsageError(f"--to: expected one of {names}, gguf, mlx, got `{target}`")
    choice = Choice(format=Format(target), rounding=rounding, group_size=group_size, ragged=True)
    rule = Rule(families=(Family.ROUTED_EXPERTS,), choice=choice)
    return Recipe(name=target, scheme=scheme, rules=(rule,))


def built_in_recipes() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    folder = resources.files("k3quant.manifests")
    return sorted(f.name.removesuffix(_ENDS) for f in folder.iterdir() if f.name.endswith(_ENDS))


def load_recipe(place: str) -> Recipe:
    """Load a recipe by built-in name or path.

    Raises:
        UsageError: There is no such name or file.
        SchemaError: The file is no recipe.
    """
    if place in built_in_recipes():
        folder = resources.files("k3quant.manifests")
        return parse_recipe(folder.joinpath(place + _ENDS).read_text(), place)
    if not Path(place).is_file():
        names = ", ".join(built_in_recipes())
        raise UsageError(f"recipe {place}: expected a file or a built-in name ({names}), got none")
    return parse_recipe(Path(place).read_text(encoding="utf-8"), place)


def parse_recipe(text: str, where: str) -> Recipe:
    """Parse a recipe.

    Raises:
        SchemaError: It is no TOML, or a key or value is unknown.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(f"{where}: expected TOML, got {error}") from error
    unknown = document.keys() - {"name", "scheme", "rule"}
    rules = document.get("rule")
    if unknown or not isinstance(rules, list) or not rules:
        got = f"the keys {sorted(document)}"
        raise SchemaError(f"{where}: expected name, scheme and at least one [[rule]], got {got}")
    return Recipe(
        name=str(document.get("name", where)),
        scheme=str(document.get("scheme", "compressed-tensors")),
        rules=tuple(_rule(rule, f"{where}: rule {n}") for n, rule in enumerate(rules, start=1)),
    )


def assign(recipe: Recipe, k3: K3Config) -> Assignment:
    """Give each weight that a rule names its format.

    Args:
        recipe: The rules.
        k3: The typed config.

    Returns:
        Format by module; what no rule names is absent.

    Raises:
        SchemaError: A rule matches nothing, two match one weight, or a format does not fit.
    """
    assignment: dict[str, Choice] = {}
    by_rule: dict[str, int] = {}
    used = [0] * len(recipe.rules)
    for shard in range(1, num_shards(k3) + 1):
        for spec in shard_tensors(k3, shard, packed=False):
            if not spec.name.endswith(".weight") or len(spec.shape) != 2:
                continue
            for number, rule in enumerate(recipe.rules):
                if not rule.matches(spec):
                    continue
                if spec.module in by_rule:
                    first = by_rule[spec.module] + 1
                    raise SchemaError(
                        f"{recipe.name}: expected one rule for {spec.module}, got rules {first} "
                        f"and {number + 1}"
                    )
                _check_fit(recipe.name, number, rule.choice, spec)
                by_rule[spec.module] = number
                used[number] += 1
                if rule.choice.format is not Format.KEEP:
                    assignment[spec.module] = rule.choice
    for number, count in enumerate(used, start=1):
        if not count:
            raise SchemaError(f"{recipe.name}: expected rule {number} to match a weight, got none")
    return assignment


def _check_fit(recipe: str, number: int, choice: Choice, spec: TensorSpec) -> None:
    if choice.format is Format.KEEP:
        return
    try:
        list(encoded_parts(choice, *spec.shape))
    except SchemaError as error:
        raise SchemaError(
            f"{recipe}: rule {number + 1}: {spec.module}: {error.message}", hint=error.hint
        ) from error


def _rule(fields: Mapping[str, Any], where: str) -> Rule:
    unknown = fields.keys() - _KEYS
    if unknown or "format" not in fields:
        raise SchemaError(f"{where}: expected format and {sorted(_KEYS)}, got {sorted(fields)}")
    try:
        pattern = fields.get("pattern")
        if pattern is not None:
            re.compile(pattern)
        return Rule(
            families=tuple(Family(name) for name in fields.get("families", [])),
            roles=tuple(str(name) for name in fields.get("roles", [])),
            layers=_range(fields.get("layers")),
            experts=_range(fields.get("experts")),
            pattern=pattern,
            choice=Choice(
                format=Format(fields["format"]),
                rounding=ScaleRounding(fields.get("rounding", ScaleRounding.EVEN)),
                group_size=fields.get("group_size", 32),
                ragged=fields.get("ragged", False),
            ),
        )
    except (ValueError, TypeError, re.error) as error:
        raise SchemaError(f"{where}: expected known values, got {error}") from error


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    result = int(first), int(last or first)
    if result[1] < result[0]:
        raise ValueError(f"range {text}")
    return result


def _within(value: int | None, bounds: tuple[int, int] | None) -> bool:
    return bounds is None or (value is not None and bounds[0] <= value <= bounds[1])
