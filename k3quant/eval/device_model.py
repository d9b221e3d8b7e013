"""A checkpoint that computes on a device: weights streamed to it, the walk planned beforehand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from k3quant.checkpoint.reader import Checkpoint
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_layer import DeviceLayer, device_blocks
from k3quant.eval.source import HeadBlock
from k3quant.eval.stored import StoredTensors
from k3quant.eval.weight_walk import WeightWalk, largest_chunks
from k3quant.models.k3_config import K3Config
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap, under
from k3quant.stream.budget import Budget, Need, plan_budget

GROUP_TOKENS = 8192
SMALL_GROUP_TOKENS = 2048
SMALL_VRAM_BYTES = 48 << 30
# Float32 activations of attention's width that are alive together, per token.
WIDE_ACTIVATIONS = 16


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """One walk: the weights that arrive, and what computes with them.

    Attributes:
        weights: The weights.
        forms: Runs the halves of a layer.
    """

    weights: WeightWalk
    forms: DeviceLayer

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
        own = self.weights.layer(layer)
        prefix = f"layers.{layer}."
        alone: Tap | None = None
        if tap is not None:
            outer = under(tap, prefix)
            assert outer is not None
            alone = lambda name, value: outer(name, value[0])  # noqa: E731  one window
        residual = self.forms.attend(
            residual, own, layer, batches, tap=alone, attn_tap=under(attn_tap, prefix)
        )
        return self.forms.mlp(
            residual,
            own,
            self.weights,
            layer,
            tap=under(tap, prefix),
            watch=under(mlp_tap, prefix),
            copies=copies,
        )


class DeviceModel:
    """A checkpoint whose layers run on a device.

    Attributes:
        config: Its config.
        dtype: Dtype of the activations.
        device: Where it computes.
        budget: How device memory is shared out; None before the first embedding.
        expert_bytes: Bytes of a routed expert.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        vram_bytes: int | None = None,
        ram_bytes: int | None = None,
        threads: int = 16,
        share: int = 1,
    ) -> None:
        """Check config and tensors.

        Args:
            checkpoint: The opened checkpoint.
            dtype: Dtype of the activations.
            device: Where to compute.
            vram_bytes: Device memory to use; None takes nine tenths of what is free.
            ram_bytes: Host memory to use; None is no bound.
            threads: Reads at a time.
            share: Models that share both.

        Raises:
            SchemaError: The config is not K3's, or a tensor is missing or of another shape or
                dtype.
        """
        self._host = CheckpointModel(checkpoint, dtype=dtype, ahead_bytes=1 << 28, threads=1)
        self.config: K3Config = self._host.config
        self.dtype = dtype
        self.device = device
        self.budget: Budget | None = None
        self._checkpoint = checkpoint
        self._stored: StoredTensors = self._host.stored
        free = vram_bytes or _free_bytes(device)
        self._vram_bytes = free // share
        self._ram_bytes = None if ram_bytes is None else ram_bytes // share
        self._threads = threads
        self._tokens = 0
        small = self._vram_bytes < SMALL_VRAM_BYTES
        self._own_bytes, self.expert_bytes = largest_chunks(checkpoint, self._stored)
        self._layer = DeviceLayer(
            config=self.config,
            device=device,
            blocks=device_blocks(self.config, precise=dtype is torch.float32),
            group=SMALL_GROUP_TOKENS if small else GROUP_TOKENS,
        )

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._host.bytes_read

    @contextmanager
    def walk(self, first: int = 0) -> Iterator[DeviceRun]:
        """Open a walk through the layers, from one of them to the last; reading starts at once."""
        budget = self.budget or self._plan(1)
        with WeightWalk(
            self._checkpoint,
            self._stored,
            first=first,
            dtype=self.dtype,
            device=self.device,
            budget=budget,
            own_bytes=self._own_bytes,
            expert_bytes=self.expert_bytes,
            threads=self._threads,
            tokens=self._tokens,
        ) as weights:
            yield DeviceRun(weights, self._layer)

    def embed(self, ids: Tensor) -> Tensor:
        """Read only the embedding rows that are needed, `[N, D]`, where the stream will live.

        Raises:
            ResourceError: The budget is too small for these tokens.
        """
        self.budget = self._plan(len(ids))
        rows = self._host.embed(ids.cpu())
        if self.budget.stream_on_device:
            return rows.to(self.device)
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def global_weight(self, role: str) -> Tensor:
        """Return a small weight outside the layers."""
        return self._host.global_weight(role).to(self.device)

    def head_blocks(self) -> Iterator[HeadBlock]:
        """Yield lm_head in float32, a block of the vocabulary at a time."""
        for first, weight in self._host.head_rows():
            yield first, weight.to(self.device).float()

    def find_non_finite(self, layer: int | None) -> tuple[str, int] | None:
        """Return the first tensor of a layer that holds NaN or infinity, and how many."""
        return self._host.find_non_finite(layer)

    def _plan(self, tokens: int) -> Budget:
        self._tokens = tokens
        config, size = self.config, self.dtype.itemsize
        every = config.attn_res_block_size
        saved = 0 if every is None else -(-config.num_hidden_layers // every)
        wide = max(config.kda.width, config.mla.num_heads * config.mla.qk_head_dim)
        # Of all tokens: what experts read and their sum; the new stream beside the old.
        experts = tokens * config.expert_width * (size + 4)
        work = self._layer.group * WIDE_ACTIVATIONS * wide * 4 + experts
        need = Need(
            own=self._own_bytes,
            expert=self.expert_bytes,
            experts=config.moe.num_experts if self.expert_bytes else 0,
            work=work,
            token=(2 + saved) * config.hidden_size * size,
        )
        return plan_budget(
            need,
            tokens=tokens,
            threads=self._threads,
            vram_bytes=self._vram_bytes,
            ram_bytes=self._ram_bytes,
        )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 34
    free, _ = torch.cuda.mem_get_info(device)
    return free * 9 // 10
