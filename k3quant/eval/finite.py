"""Values that are not finite are refused, and the tensor they come from is named."""

from collections.abc import Callable

import torch
from torch import Tensor

from k3quant.errors import ValuesError
from k3quant.eval.source import Model


def check_finite(values: Tensor, model: Model, layer: int | None, where: str) -> None:
    """Refuse values that are not finite, and name the tensor they come from.

    Args:
        values: What was computed.
        model: The model.
        layer: Layer whose weights took part; None for those outside the layers.
        where: Place in the model, for the message.

    Raises:
        ValuesError: A value is NaN or infinite.
    """
    refuse_non_finite(count_non_finite(values), lambda: model.find_non_finite(layer), where)


def refuse_non_finite(found: int, find: Callable[[], tuple[str, int] | None], where: str) -> None:
    """Refuse values that are not finite, and name the tensor they come from.

    Args:
        found: How many values are NaN or infinite.
        find: Looks for the first weight that took part and holds such values, and counts them.
        where: Place in the model, for the message.

    Raises:
        ValuesError: Any were found.
    """
    if not found:
        return
    guilty = find()
    because = "every weight there is finite"
    if guilty is not None:
        because = f"tensor {guilty[0]} holds {guilty[1]} such values"
    raise ValuesError(
        f"{where}: expected finite values, got {found} that are NaN or infinite; {because}",
        hint="`k3quant verify --level values` checks every tensor",
    )


def count_non_finite(values: Tensor) -> int:
    """Return how many elements are NaN or infinite."""
    # A sum is finite when all its terms are; only otherwise is a second look needed.
    if bool(torch.isfinite(values.sum(dtype=torch.float64))):
        return 0
    return int((~torch.isfinite(values)).sum())
