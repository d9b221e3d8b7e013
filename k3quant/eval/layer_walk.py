"""One walk through a checkpoint's layers, with the bytes that come next in flight."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from k3quant.eval.prefetch import Prefetch
from k3quant.eval.stored import LayerUnit, Parts, StoredTensors, exact_roles
from k3quant.eval.weights import decode_weights


class LayerWalk:
    """Gives the weights of one layer after the other; experts are decoded as they are asked for."""

    def __init__(
        self,
        stored: StoredTensors,
        *,
        first: int = 0,
        dtype: torch.dtype,
        ahead_bytes: int,
        threads: int,
    ) -> None:
        """Start reading.

        Args:
            stored: The tensors.
            first: Layer to begin with.
            dtype: Dtype of the activations.
            ahead_bytes: Bound of the bytes that are read but not yet taken.
            threads: Reads at a time.
        """
        self._stored = stored
        self._dtype = dtype
        self._wanted: dict[int, frozenset[int]] = {}
        layers = range(first, stored.config.num_hidden_layers)
        self._queue: Prefetch[LayerUnit, Parts] = Prefetch(
            (unit for layer in layers for unit in stored.layer_units(layer)),
            stored.read_unit,
            budget_bytes=ahead_bytes,
            threads=threads,
            wanted=self._is_wanted,
        )

    def __enter__(self) -> "LayerWalk":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.close()

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Return a layer's weights by role, without routed experts."""
        roles = {s.role for s in self._stored.layer_specs(layer) if s.expert is None}
        weights: dict[str, Tensor] = {}
        while len(weights) < len(roles):
            weights |= self._take(layer, None)
        return weights

    def experts(self, layer: int, wanted: Sequence[int]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the weights of some routed experts, ascending; the others are no longer read."""
        self._wanted[layer] = frozenset(wanted)
        for expert in wanted:
            yield self._take(layer, expert)

    def _is_wanted(self, unit: LayerUnit) -> bool:
        wanted = self._wanted.get(unit.layer)
        return unit.expert is None or wanted is None or unit.expert in wanted

    def _take(self, layer: int, expert: int | None) -> dict[str, Tensor]:
        unit, parts = self._queue.take()
        if (unit.layer, unit.expert) != (layer, expert):
            raise ValueError(
                f"walk: expected layers and experts in order, got {(layer, expert)} where "
                f"{(unit.layer, unit.expert)} comes next"
            )
        return decode_weights(
            parts, dtype=self._dtype, exact=exact_roles(unit.specs), where=unit.where
        )
