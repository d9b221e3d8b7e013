"""What the engine asks of a scheme that keeps safetensors files: names, shapes, documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.convert.choice import Choice, Format
from k3quant.models.k3_config import K3Config

Array = npt.NDArray[np.generic]
Entry = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

Assignment = Mapping[str, Choice]
"""Format of each converted module, by the module's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One ecosystem's spelling.

    Attributes:
        name: As `--scheme` names it.
        formats: Formats it can spell.
        suffixes: Suffix of each encoded part, for parts that it names otherwise.
        entries: Tensors that a module becomes: format, module, rows, columns.
        value: What is stored for an encoded part.
        constants: Further tensors of a module, by suffix.
        documents: Files beside the shards, from the source config and the assignment.
    """

    name: str
    formats: frozenset[Format]
    suffixes: Callable[[Choice, str], str]
    entries: Callable[[Choice, str, int, int], list[Entry]]
    value: Callable[[str, Array], Array]
    constants: Callable[[Choice], Mapping[str, Array]]
    documents: Callable[[dict[str, Any], K3Config, Assignment], dict[str, Any]]
