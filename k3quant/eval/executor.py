"""The whole model, a layer at a time: all tokens pass a layer before the next one's weights come.

What is kept between layers is the residual stream of all tokens. Attention runs on batches of
windows, the MLP half on all tokens at once, so that each expert is decoded once a layer.

Legend: N tokens of all windows, D hidden.
"""

from collections import deque
from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from k3quant.eval.finite import check_finite
from k3quant.eval.layer_step import batch_tokens, plan_batches, run_layer
from k3quant.eval.source import Model
from k3quant.eval.windows import Ids, Window
from k3quant.models.k3_layer import final_hidden
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap
from k3quant.progress import SILENT, Progress

FINISH_ROWS = 8192  # of a stream that is brought to a device


def walk_layers(
    model: Model,
    inputs: Sequence[Ids],
    *,
    tap: Tap | None = None,
    mlp_tap: Tap | None = None,
    progress: Progress = SILENT,
    embedding: Tensor | None = None,
) -> Generator[Residual]:
    """Run windows through the model and yield the residual stream after each layer.

    Args:
        model: The model.
        inputs: Ids of each window; each window starts without memory.
        tap: Receives all intermediates of one window, as `layers.I.NAME`.
        mlp_tap: Receives those of the MLP halves only, `[N, ...]`, from any number of windows.
        progress: Is told about each layer.
        embedding: `[N, D]` stream to begin with in place of the ids' embedding rows.

    Yields:
        The stream of all tokens, `[N, D]`, windows one behind the other: first the embedding, then
        after each layer.

    Raises:
        ValuesError: The stream is no longer finite; names the layer and the tensor.
        ValueError: A tap and several windows.
    """
    if tap is not None and len(inputs) != 1:
        raise ValueError(f"tap: expected one window, got {len(inputs)}")
    config = model.config
    batches = plan_batches([len(ids) for ids in inputs], tokens=batch_tokens(config))
    if embedding is None:
        embedding = model.embed(torch.from_numpy(np.concatenate(inputs)))
    residual = Residual(embedding)
    check_finite(residual.prefix, model, None, "the embedding")
    yield residual
    with model.walk() as weights:
        for layer in range(config.num_hidden_layers):
            progress.note(f"layer {layer}")
            residual = run_layer(residual, model, weights, layer, batches, tap=tap, mlp_tap=mlp_tap)
            progress.advance(1)
            yield residual


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
    prefix, *blocks = (x[rows].to(device or x.device) for x in (residual.prefix, *residual.blocks))
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
