"""One layer for all tokens: attention on batches of windows, the MLP half on everything at once.

Legend: N tokens of all windows, b windows of a batch, T tokens of its longest, D hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from k3quant.eval.finite import check_finite
from k3quant.eval.mlp_copies import mlp_of_copies
from k3quant.eval.source import Model, RunsLayers, Weights
from k3quant.models.k3_config import K3Config, LayerKind
from k3quant.models.k3_layer import LayerCache, attention_half, mlp_half
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap, under

BATCH_ELEMENTS = 1 << 25  # 128 MiB of float32 for each activation of attention's width
BATCH_TOKENS = 4096


def plan_batches(lengths: Sequence[int], *, tokens: int) -> list[Tensor]:
    """Group windows of like length, longest first.

    A short window is filled up behind its end, where causal attention keeps the filling from its
    tokens; which positions count follows from lengths alone, never from ids.

    Args:
        lengths: Tokens of each window.
        tokens: Tokens a batch may have with its filling; a longer window is a batch of its own.

    Returns:
        One `[b, T]` int64 a batch: places in the row of all tokens, -1 behind a window's end.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)))
    order = sorted(range(len(lengths)), key=lambda window: (-lengths[window], window))
    batches: list[Tensor] = []
    while order:
        T = lengths[order[0]]
        count = max(1, tokens // T)
        batch = torch.full((min(count, len(order)), T), -1, dtype=torch.int64)
        for row, window in enumerate(order[:count]):
            start, length = int(starts[window]), lengths[window]
            batch[row, :length] = torch.arange(start, start + length)
        batches.append(batch)
        order = order[count:]
    return batches


def run_layer(
    residual: Residual,
    model: Model,
    walk: Weights | RunsLayers,
    layer: int,
    batches: Sequence[Tensor],
    *,
    tap: Tap | None,
    mlp_tap: Tap | None,
    attn_tap: Tap | None = None,
    copies: int = 1,
) -> Residual:
    """Run a layer for all tokens.

    Args:
        residual: The stream before it, `[N, D]`.
        model: The model.
        walk: The walk, at this layer.
        layer: 0-based layer.
        batches: Places of the windows' tokens, see `plan_batches`.
        tap: Receives all intermediates of one window.
        mlp_tap: Receives those of the MLP half.
        attn_tap: Receives `attn_out` of all tokens, `[N, D]`.
        copies: Parts of equal length that the stream consists of, each computed as if alone.

    Raises:
        ValuesError: The stream is no longer finite.
    """
    if isinstance(walk, RunsLayers):
        residual = walk.run_layer(
            residual,
            layer,
            batches,
            tap=tap,
            mlp_tap=mlp_tap,
            attn_tap=attn_tap,
            copies=copies,
        )
        check_finite(residual.prefix, model, layer, f"layer {layer}")
        return residual
    # The layer's weights live no longer than this call: those of two layers never exist together.
    own = walk.layer(layer)
    prefix = f"layers.{layer}."
    residual = _attend(
        residual,
        own,
        model.config,
        layer,
        batches,
        tap=under(tap, prefix),
        attn_tap=under(attn_tap, prefix),
    )
    check_finite(residual.prefix, model, layer, f"layer {layer}, after attention")

    def experts(wanted: Sequence[int]) -> Iterator[Mapping[str, Tensor]]:
        return walk.experts(layer, wanted)

    mlp = partial(mlp_of_copies, copies=copies) if copies > 1 else mlp_half
    residual = mlp(residual, own, experts, model.config, layer, tap=under(tap or mlp_tap, prefix))
    check_finite(residual.prefix, model, layer, f"layer {layer}, after its MLP")
    return residual


def batch_tokens(config: K3Config) -> int:
    """Return the tokens that attention takes at a time."""
    widest = max(config.kda.width, config.mla.num_heads * config.mla.qk_head_dim)
    return min(BATCH_TOKENS, max(1, BATCH_ELEMENTS // widest))


def _attend(
    residual: Residual,
    weights: Mapping[str, Tensor],
    config: K3Config,
    layer: int,
    batches: Sequence[Tensor],
    *,
    tap: Tap | None,
    attn_tap: Tap | None,
) -> Residual:
    prefix, blocks = torch.empty_like(residual.prefix), residual.blocks
    attended = torch.empty_like(prefix) if attn_tap is not None else None
    segment = batch_tokens(config)
    for batch in batches:
        cache: LayerCache | None = None
        # Linear attention takes a long window in pieces; latent attention bounds itself.
        whole = tap is not None or config.layer_kinds[layer] is LayerKind.MLA
        for places in (batch,) if whole else torch.split(batch, segment, dim=1):
            # What fills up a row repeats the first token of all: any token will do.
            index = places.clamp(min=0)
            piece = Residual(residual.prefix[index], tuple(x[index] for x in residual.blocks))
            batch_tap = _batch_tap(tap, attended, places)
            out, cache = attention_half(piece, weights, config, layer, cache=cache, tap=batch_tap)
            real = places >= 0
            prefix[places[real]] = out.prefix[real]
            if len(out.blocks) > len(residual.blocks):
                blocks = (*residual.blocks, residual.prefix)
    if attn_tap is not None and attended is not None:
        attn_tap("attn_out", attended)
    return Residual(prefix, blocks)


def _batch_tap(tap: Tap | None, attended: Tensor | None, places: Tensor) -> Tap | None:
    """Return the tap of one batch: all of it for `tap`, its tokens' `attn_out` for `attended`."""
    if tap is None and attended is None:
        return None

    def receive(name: str, value: Tensor) -> None:
        if tap is not None:
            tap(name, value[0])  # drops the batch of one
        if attended is not None and name == "attn_out":
            real = places >= 0
            attended[places[real]] = value[real]

    return receive
