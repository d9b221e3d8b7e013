"""A checkpoint as the executor's model: read by ranges and decoded on the CPU."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.eval.finite import count_non_finite
from k3quant.eval.prefetch import Prefetch
from k3quant.eval.source import HeadBlock
from k3quant.eval.stored import StoredTensors
from k3quant.eval.weight_walk import WeightWalk, largest_chunks
from k3quant.eval.weights import decode_weight
from k3quant.models.k3_config import K3Config, read_config
from k3quant.stream.budget import plan_ahead

HEAD_BLOCK_ELEMENTS = 1 << 24  # 64 MiB of float32 lm_head
GATHER_GAP_BYTES = 1 << 16  # embedding rows closer than this are read in one go
GATHER_READ_BYTES = 1 << 23
ROW_TABLES = ("embed_tokens", "lm_head")


class RowRange:
    """A run of rows of a table."""

    def __init__(self, first: int, last: int, row_bytes: int) -> None:
        self.first, self.last = first, last
        self.num_bytes = (last - first) * row_bytes


class CheckpointModel:
    """A checkpoint that was proved to hold every tensor of the language model.

    Attributes:
        config: Its config.
        dtype: Dtype of the activations.
        device: Where it computes, the processor.
        stored: Its tensors.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, ahead_bytes: int, threads: int
    ) -> None:
        """Check config and tensors.

        Args:
            checkpoint: The opened checkpoint.
            dtype: Dtype of the activations.
            ahead_bytes: Bound of the experts' bytes that are read ahead.
            threads: Reads at a time.

        Raises:
            SchemaError: The config is not K3's, or a tensor is missing or of another shape or
                dtype.
        """
        self.config: K3Config = read_config(checkpoint.config)
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.stored = StoredTensors(checkpoint, self.config)
        self._checkpoint = checkpoint
        self._tokens = 0
        self._ahead_bytes = ahead_bytes
        self._threads = threads

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self.stored.bytes_read

    def walk(self, first: int = 0) -> WeightWalk:
        """Open a walk through the layers, from one of them to the last; reading starts at once."""
        own, expert = largest_chunks(self._checkpoint, self.stored)
        experts = self.config.moe.num_experts if expert else 0
        return WeightWalk(
            self._checkpoint,
            self.stored,
            first=first,
            dtype=self.dtype,
            device=self.device,
            budget=plan_ahead(
                own=own, expert=expert, experts=experts, ahead_bytes=self._ahead_bytes
            ),
            own_bytes=own,
            expert_bytes=expert,
            threads=self._threads,
            tokens=self._tokens,
        )

    def global_weight(self, role: str) -> Tensor:
        """Return a small weight outside the layers."""
        return decode_weight(self.stored.read_global(role), dtype=self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Read only the embedding rows that are needed.

        Args:
            ids: `[N]` int64.

        Returns:
            `[N, D]`.
        """
        self._tokens = len(ids)
        unique, place = np.unique(ids.numpy(), return_inverse=True)
        rows = torch.empty((len(unique), self.config.hidden_size), dtype=self.dtype)
        for run in _runs(unique, self.stored.row_bytes("embed_tokens")):
            first, last = int(unique[run.start]), int(unique[run.stop - 1]) + 1
            rows[run] = self._rows("embed_tokens", first, last)[
                torch.from_numpy(unique[run] - first)
            ]
        return rows[torch.from_numpy(place)]

    def head_blocks(self) -> Iterator[HeadBlock]:
        """Yield lm_head in float32, a block of the vocabulary at a time, the next in flight."""
        for first, weight in self.head_rows():
            yield first, weight.float()

    def head_rows(self) -> Iterator[HeadBlock]:
        """Yield lm_head as `head_blocks`, in the dtype of the activations."""
        blocks = self._row_ranges("lm_head")

        def read(block: RowRange) -> Tensor:
            return self._rows("lm_head", block.first, block.last)

        budget = 2 * blocks[0].num_bytes
        with Prefetch(blocks, read, budget_bytes=budget, threads=1) as queue:
            for _ in blocks:
                block, weight = queue.take()
                yield block.first, weight

    def find_non_finite(self, layer: int | None) -> tuple[str, int] | None:
        """Return the first tensor of a layer that holds NaN or infinity, and how many.

        None as the layer asks for the tensors outside the layers.
        """
        for name, values in self._globals() if layer is None else self._of_layer(layer):
            found = count_non_finite(values)
            if found:
                return name, found
        return None

    def _of_layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        for parts in self.stored.read_layer(layer):
            first = next(iter(parts.values()))
            yield first.name, decode_weight(parts, dtype=torch.float32)

    def _globals(self) -> Iterator[tuple[str, Tensor]]:
        for role in self.stored.global_roles:
            name = self.stored.global_name(role)
            if role not in ROW_TABLES:
                yield name, self.global_weight(role)
                continue
            for block in self._row_ranges(role):
                yield name, self._rows(role, block.first, block.last)

    def _row_ranges(self, role: str) -> list[RowRange]:
        V, row_bytes = self.config.vocab_size, self.stored.row_bytes(role)
        step = max(1, HEAD_BLOCK_ELEMENTS // self.config.hidden_size)
        return [RowRange(first, min(first + step, V), row_bytes) for first in range(0, V, step)]

    def _rows(self, role: str, first: int, last: int) -> Tensor:
        return decode_weight(self.stored.read_rows(role, first, last), dtype=self.dtype)


def _runs(ids: npt.NDArray[np.int64], row_bytes: int) -> Iterator[slice]:
    """Yield slices of ascending ids whose rows are read in one go."""
    gap, longest = GATHER_GAP_BYTES // row_bytes, max(1, GATHER_READ_BYTES // row_bytes)
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] - ids[i - 1] > gap + 1 or ids[i] - ids[start] >= longest:
            yield slice(start, i)
            start = i
