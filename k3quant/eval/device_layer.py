"""One layer on a device: attention window by window, the MLP half in groups of tokens.

The stream may live on the device or on the host; a group of it is brought over, computed and put
back. Numbers are those of `models.k3_layer`, in the forms that `ops` chooses.

Legend: N tokens of all windows, b windows of a batch, T tokens of its longest, D hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from k3quant import ops
from k3quant.eval.device_moe import routed_experts
from k3quant.eval.weight_walk import WeightWalk
from k3quant.models.k3_config import K3Config, LayerKind, MoeConfig
from k3quant.models.k3_layer import (
    Blocks,
    LayerCache,
    attention_half,
    dense_mlp,
    mlp_input,
)
from k3quant.models.moe import after_experts, before_experts
from k3quant.models.residual import Residual
from k3quant.models.router import Routing, route
from k3quant.models.situ import Gate, silu_gate
from k3quant.models.tap import Tap

BOUNDED_DECAY = -5.0  # below it the chunked kernels may lose digits


def device_blocks(config: K3Config, *, precise: bool) -> Blocks:
    """Return the forms that `ops` chooses by where its tensors are; `precise` is float32."""
    bound = config.kda.gate_lower_bound
    bounded = bound is not None and bound >= BOUNDED_DECAY

    def mix(residual: Residual, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
        return ops.mix_blocks(residual, norm, proj, eps=eps)

    def delta_rule(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return ops.delta_rule(q, k, v, log_decay, beta, state, bounded=bounded, precise=precise)

    def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        return ops.gated_rms_norm(x, weight, gate, eps=eps)

    def choose(x: Tensor, gate: Tensor, bias: Tensor, moe: MoeConfig, tap: Tap | None) -> Routing:
        if tap is not None:
            return route(x, gate, bias, moe, tap)
        return ops.route(x, gate, bias, moe)

    return Blocks(
        mix=mix,
        convolve=ops.short_convolution,
        delta_rule=delta_rule,
        gated_norm=gated_norm,
        attend=ops.attend,
        choose=choose,
        gate=_gate(config),
    )


def _gate(config: K3Config) -> Gate:
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    if beta is None or linear_beta is None:
        return silu_gate
    return lambda gate, up: ops.situ(gate, up, beta=beta, linear_beta=linear_beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """How a layer runs on a device.

    Attributes:
        config: The config.
        device: Where it computes.
        blocks: Forms of its parts.
        group: Tokens at a time, of attention and of the MLP half.
    """

    config: K3Config
    device: torch.device
    blocks: Blocks
    group: int

    def attend(
        self,
        residual: Residual,
        weights: Mapping[str, Tensor],
        layer: int,
        batches: Sequence[Tensor],
        *,
        tap: Tap | None = None,
        attn_tap: Tap | None = None,
    ) -> Residual:
        """Run the attention half for all windows; the stream stays where it is.

        Args:
            residual: The stream, `[N, D]`.
            weights: The layer's own.
            layer: 0-based layer.
            batches: Places of the windows' tokens, see `layer_step.plan_batches`.
            tap: Receives intermediates of a single window.
            attn_tap: Receives `attn_out` of all tokens, `[N, D]`, where the stream is.
        """
        prefix = torch.empty_like(residual.prefix)
        attended = torch.empty_like(prefix) if attn_tap is not None else None
        starts_block = False
        for batch in batches:
            cache: LayerCache | None = None
            whole = tap is not None or self.config.layer_kinds[layer] is LayerKind.MLA
            step = max(1, self.group // len(batch))
            for places in (batch,) if whole else torch.split(batch, step, dim=1):
                out, cache = attention_half(
                    self._gather(residual, places),
                    weights,
                    self.config,
                    layer,
                    cache=cache,
                    blocks=self.blocks,
                    tap=tap if attended is None else _catch(tap, attended, places),
                )
                starts_block = len(out.blocks) > len(residual.blocks)
                _scatter(prefix, places, out.prefix)
        if attn_tap is not None and attended is not None:
            attn_tap("attn_out", attended)
        blocks = (*residual.blocks, residual.prefix) if starts_block else residual.blocks
        return Residual(prefix, blocks)

    def mlp(
        self,
        residual: Residual,
        weights: Mapping[str, Tensor],
        walk: WeightWalk,
        layer: int,
        *,
        tap: Tap | None = None,
        watch: Tap | None = None,
        copies: int = 1,
    ) -> Residual:
        """Run the MLP half for all tokens; arguments as `attend`, and two more.

        Args:
            residual: The stream, `[copies * N, D]`.
            weights: The layer's own.
            walk: Gives the experts.
            layer: 0-based layer.
            tap: Receives all intermediates.
            watch: Receives only `topk_ids` and `mlp_out`, where the stream is.
            copies: Parts of equal length that no group of tokens may mix.
        """
        prefix = torch.empty_like(residual.prefix)
        outputs = torch.empty_like(prefix) if watch is not None else None
        N = len(prefix) // copies
        groups = [
            slice(start + first, start + min(first + self.group, N))
            for start in range(0, copies * N, N)
            for first in range(0, N, self.group)
        ]
        is_moe = self.config.is_moe(layer)
        taps: dict[str, list[Tensor]] = {}

        def keep(name: str, value: Tensor) -> None:
            taps.setdefault(name, []).append(value)

        inner = None if tap is None else keep
        y: Tensor | None = None
        if is_moe:
            y = self._routed(residual, groups, weights, walk, layer, tap=inner, watch=watch)
        for rows in groups:
            piece = self._slice(residual, rows)
            h, x = mlp_input(piece, weights, self.config, self.blocks)
            if y is None:
                m = dense_mlp(x, weights, self.config, self.blocks.gate)
            else:
                m = after_experts(
                    x, y[rows], weights, self.config, gate=self.blocks.gate, tap=inner
                )
            out = piece.prefix + m
            prefix[rows] = out.to(prefix.device)
            if outputs is not None:
                outputs[rows] = m.to(outputs.device)
            if inner is not None:
                for name, value in (
                    ("mlp_res_out", h),
                    ("mlp_in", x),
                    ("mlp_out", m),
                    ("out", out),
                ):
                    inner(name, value)
        if tap is not None:
            for name, values in taps.items():
                tap(name, torch.cat(values))
        if watch is not None and outputs is not None:
            watch("mlp_out", outputs)
        return Residual(prefix, residual.blocks)

    def _routed(
        self,
        residual: Residual,
        groups: Sequence[slice],
        weights: Mapping[str, Tensor],
        walk: WeightWalk,
        layer: int,
        *,
        tap: Tap | None,
        watch: Tap | None,
    ) -> Tensor:
        chosen: list[Routing] = []
        latents: list[Tensor] = []
        for rows in groups:
            _, x = mlp_input(self._slice(residual, rows), weights, self.config, self.blocks)
            routing, z = before_experts(x, weights, self.config, choose=self.blocks.choose, tap=tap)
            chosen.append(routing)
            latents.append(z)
        routing = Routing(
            torch.cat([r.topk_idx for r in chosen]), torch.cat([r.topk_weight for r in chosen])
        )
        if watch is not None:
            watch("topk_ids", routing.topk_idx)
        z = torch.cat(latents)
        del latents, chosen
        beta, linear_beta = (
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
        )
        assert self.blocks.gate is not None
        return routed_experts(
            z,
            routing,
            walk.chunks(layer, routing.topk_idx),
            walk.release,
            num_experts=self.config.moe.num_experts,
            gate=self.blocks.gate,
            betas=None if beta is None or linear_beta is None else (beta, linear_beta),
        )

    def _slice(self, residual: Residual, rows: slice) -> Residual:
        return Residual(
            residual.prefix[rows].to(self.device, non_blocking=True),
            tuple(x[rows].to(self.device, non_blocking=True) for x in residual.blocks),
        )

    def _gather(self, residual: Residual, places: Tensor) -> Residual:
        run = _run_of(places)
        if run is not None:
            found = self._slice(residual, run)
        else:
            # What fills up a row repeats the first token of all: any token will do.
            rows = places.clamp(min=0).flatten().to(residual.prefix.device)
            found = Residual(
                residual.prefix[rows].to(self.device),
                tuple(x[rows].to(self.device) for x in residual.blocks),
            )
        shape = (*places.shape, -1)
        return replace(
            found,
            prefix=found.prefix.view(shape),
            blocks=tuple(x.view(shape) for x in found.blocks),
        )


def _catch(tap: Tap | None, attended: Tensor, places: Tensor) -> Tap:
    """Return a tap that also puts a batch's `attn_out` where its tokens are."""

    def receive(name: str, value: Tensor) -> None:
        if tap is not None:
            tap(name, value)
        if name == "attn_out":
            _scatter(attended, places, value)

    return receive


def _scatter(prefix: Tensor, places: Tensor, values: Tensor) -> None:
    """Put a batch's rows where they belong; what only fills up is dropped."""
    rows, run = values.reshape(-1, values.shape[-1]), _run_of(places)
    if run is not None:
        prefix[run] = rows.to(prefix.device)
        return
    real = (places.flatten() >= 0).nonzero()[:, 0]
    target = places.flatten()[real].to(prefix.device)
    prefix[target] = rows[real.to(rows.device)].to(prefix.device)


def _run_of(places: Tensor) -> slice | None:
    """Return a batch's places as one run, where they lie side by side and nothing fills up.

    By numpy, on one thread: torch would share the work among threads that the reads keep busy.
    """
    flat = places.numpy().reshape(-1)
    first, count = int(flat[0]), flat.size
    return slice(first, first + count) if (flat == np.arange(first, first + count)).all() else None
