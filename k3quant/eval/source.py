"""The seam between the executor and whatever reads and decodes weights for it.

`CheckpointModel` does it on the CPU; anything that gives a layer's weights in order, and an
expert's when its tokens are known, can take its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from k3quant.models.k3_config import K3Config
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap

HeadBlock = tuple[int, Tensor]
"""First row and `[rows, D]` float32 weights of a part of lm_head."""


class Weights(Protocol):
    """The weights of one walk through the layers, first to last."""

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Return a layer's weights by role, without routed experts."""

    def experts(self, layer: int, wanted: Sequence[int]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the weights of some routed experts, in ascending order."""


@runtime_checkable
class RunsLayers(Protocol):
    """A walk that keeps the weights to itself and runs the layers, first to last."""

    def run_layer(
        self,
        residual: Residual,
        layer: int,
        batches: Sequence[Tensor],
        *,
        tap: Tap | None,
        mlp_tap: Tap | None,
        attn_tap: Tap | None = None,
        copies: int = 1,
    ) -> Residual:
        """Run a layer for all tokens, see `layer_step.run_layer`."""


class Model(Protocol):
    """A language model whose weights are somewhere else."""

    @property
    def config(self) -> K3Config:
        """Its config."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    def walk(self, first: int = 0) -> AbstractContextManager[Weights | RunsLayers]:
        """Open a walk through the layers, from one of them to the last."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embedding rows of `[N]` int64 ids, `[N, D]`."""

    def global_weight(self, role: str) -> Tensor:
        """Return a small weight outside the layers."""

    def head_blocks(self) -> Iterator[HeadBlock]:
        """Yield lm_head, a block of the vocabulary at a time."""

    def find_non_finite(self, layer: int | None) -> tuple[str, int] | None:
        """Return the first tensor of a layer that holds NaN or infinity, and how many.

        None as the layer asks for the tensors outside the layers.
        """
