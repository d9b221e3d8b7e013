"""The whole model, a layer at a time: all tokens pass a layer before the next one's weights come.

What is kept between layers is the residual stream of all tokens. Attention runs on batches of
windows, the MLP half on all tokens at once, so that each expert is decoded once a layer.

Legend: N tokens of all windows, D hidden.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from k3quant.eval.finite import check_finite
from k3quant.eval.layer_step import batch_tokens, plan_batches, run_layer
from k3quant.eval.pace import Pace
from k3quant.eval.source import Model
from k3quant.eval.windows import Ids, Window
from k3quant.models.k3_layer import final_hidden
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap
from k3quant.progress import SILENT, Progress

FINISH_ROWS = 8192  # of a stream that is brought to a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a walk begins that does not begin with the embedding.

    Attributes:
        layer: The first layer to run.
        residual: The stream before it, `[N, D]`.
    """

    layer: int
    residual: Residual


def walk_layers(
    model: Model,
    inputs: Sequence[Ids],
    *,
    tap: Tap | None = None,
    mlp_tap: Tap | None = None,
    attn_tap: Tap | None = None,
    progress: Progress = SILENT,
    embedding: Tensor | None = None,
    copies: int = 1,
    start: Start | None = None,
) -> Generator[Residual, Tensor | None]:
    """Run windows through the model and yield the residual stream after each layer.

    Args:
        model: The model.
        inputs: Ids of each window; each window starts without memory.
        tap: Receives all intermediates of one window, as `layers.I.NAME`.
        mlp_tap: Receives those of the MLP halves only, `[N, ...]`, from any number of windows.
        attn_tap: Receives `layers.I.attn_out`, `[N, D]`, from any number of windows.
        progress: Is told about each layer.
        embedding: `[N, D]` stream to begin with in place of the ids' embedding rows.
        copies: How often the windows are walked side by side, each copy as if it were alone. What
            is sent to the generator takes the place of the last copy's prefix before the next
            layer.
        start: Where to begin; None is the first layer.

    Yields:
        The stream of all tokens, `[copies * N, D]`, windows one behind the other: first the one
        before the first layer, then after each layer.

    Raises:
        ValuesError: The stream is no longer finite; names the layer and the tensor.
        ValueError: A tap and several windows.
    """
    if tap is not None and len(inputs) != 1:
        raise ValueError(f"tap: expected one window, got {len(inputs)}")
    config = model.config
    batches = _batches([len(ids) for ids in inputs], tokens=batch_tokens(config), copies=copies)
    if embedding is None:
        embedding = model.embed(torch.from_numpy(np.concatenate([*inputs] * copies)))
    residual = Residual(embedding)
    if start is not None:
        # The embedding says where a stream lives; what was saved goes there.
        saved = [torch.empty_like(embedding).copy_(x) for x in _tensors(start.residual)]
        residual = Residual(saved[0], tuple(saved[1:]))
    check_finite(residual.prefix, model, None, "the embedding")
    del embedding
    _replace_last(residual, (yield residual))
    first = start.layer if start else 0
    if first == config.num_hidden_layers:
        return
    pace = Pace(tokens=len(residual.prefix), layers=config.num_hidden_layers - first)
    with model.walk(first=first) as walk:
        for layer in range(first, config.num_hidden_layers):
            progress.note(pace.note(layer, bytes_read=model.bytes_read))
            residual = run_layer(
                residual,
                model,
                walk,
                layer,
                batches,
                tap=tap,
                mlp_tap=mlp_tap,
                attn_tap=attn_tap,
                copies=copies,
            )
            progress.advance(1)
            _replace_last(residual, (yield residual))


def _batches(lengths: Sequence[int], *, tokens: int, copies: int) -> list[Tensor]:
    """Plan the batches of one copy, and the same again for each other one."""
    batches, N = plan_batches(lengths, tokens=tokens), sum(lengths)
    shifted = ((torch.where(b < 0, b, b + i * N) for b in batches) for i in range(copies))
    return list(chain.from_iterable(shifted))


def _tensors(residual: Residual) -> tuple[Tensor, ...]:
    return (residual.prefix, *residual.blocks)


def _replace_last(residual: Residual, prefix: Tensor | None) -> None:
    if prefix is not None:
        residual.prefix[-len(prefix) :] = prefix


def finish(
    model: Model, residual: Residual, *, rows: Tensor | None = None, tap: Tap | None = None
) -> Tensor:
    """Return what lm_head reads.

    Args:
        model: The model.
        residual: The stream after the last layer, `[N, D]`.
        rows: `[n]` int64 tokens to finish; None is all.
        tap: Receives intermediates.

    Returns:
        `[n, D]`.

    Raises:
        ValuesError: It is not finite.
    """
    names = ["norm"]
    if model.config.attn_res_block_size is not None:
        names += ["output_attn_res_norm", "output_attn_res_proj"]
    weights = {name: model.global_weight(name) for name in names}
    if rows is not None and len(rows) == len(residual.prefix):
        rows = None
    if model.device == residual.prefix.device and model.device.type == "cpu":
        hidden = final_hidden(_part(residual, rows), weights, model.config, tap=tap)
    else:
        if rows is None:
            rows = torch.arange(len(residual.prefix))
        groups = torch.split(rows.to(residual.prefix.device), len(rows) if tap else FINISH_ROWS)
        parts = (_part(residual, group, model.device) for group in groups)
        hidden = torch.cat([final_hidden(x, weights, model.config, tap=tap) for x in parts])
    check_finite(hidden, model, None, "after the last norm")
    return hidden


def _part(residual: Residual, rows: Tensor | None, device: torch.device | None = None) -> Residual:
    """Return some rows of a stream, where they shall be."""
    if rows is None:
        return residual
    prefix, *blocks = (x[rows].to(device or x.device) for x in _tensors(residual))
    return Residual(prefix, tuple(blocks))


def scored_rows(windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Return the tokens that predict something, and what they should predict, `[n]` each.

    Rows count through all windows, as the residual stream does.
    """
    rows: list[Ids] = []
    end = 0
    for window in windows:
        end += len(window.inputs)
        rows.append(np.arange(end - len(window.targets), end))
    targets = np.concatenate([window.targets for window in windows])
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(targets)


def run_layers(
    model: Model, inputs: Sequence[Ids], *, tap: Tap | None = None, progress: Progress = SILENT
) -> Residual:
    """Run windows through all layers; arguments and errors as `walk_layers`."""
    stream = walk_layers(model, inputs, tap=tap, progress=progress)
    # A queue of one keeps only the last stream alive.
    return deque(stream, maxlen=1)[0]
