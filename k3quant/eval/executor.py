"""The whole model, a layer at a time: all tokens pass a layer before the next one's weights come.

What is kept between layers is the residual stream of all tokens. Attention runs on batches of
windows, the MLP half on all tokens at once, so that each expert is decoded once a layer.

Legend: N tokens of all windows, b windows of a batch, T tokens of its longest, D hidden.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from k3quant.errors import ValuesError
from k3quant.eval.checkpoint_model import count_non_finite
from k3quant.eval.source import Model, Weights
from k3quant.eval.windows import Ids, Window
from k3quant.models.k3_config import K3Config, LayerKind
from k3quant.models.k3_layer import LayerCache, attention_half, final_hidden, mlp_half
from k3quant.models.residual import Residual
from k3quant.models.tap import Tap, under
from k3quant.progress import SILENT, Progress

BATCH_ELEMENTS = 1 << 25  # 128 MiB of float32 for each activation of attention's width
BATCH_TOKENS = 4096


def walk_layers(
    model: Model,
    inputs: Sequence[Ids],
    *,
    tap: Tap | None = None,
    mlp_tap: Tap | None = None,
    progress: Progress = SILENT,
) -> Generator[Residual]:
    """Run windows through the model and yield the residual stream after each layer.

    Args:
        model: The model.
        inputs: Ids of each window; each window starts without memory.
        tap: Receives all intermediates of one window, as `layers.I.NAME`.
        mlp_tap: Receives those of the MLP halves only, `[N, ...]`, from any number of windows.
        progress: Is told about each layer.

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
    batches = plan_batches([len(ids) for ids in inputs], tokens=_batch_tokens(config))
    residual = Residual(model.embed(torch.from_numpy(np.concatenate(inputs))))
    check_finite(residual.prefix, model, None, "the embedding")
    yield residual
    with model.walk() as weights:
        for layer in range(config.num_hidden_layers):
            progress.note(f"layer {layer}")
            residual = _run_layer(
                residual, model, weights, layer, batches, tap=tap, mlp_tap=mlp_tap
            )
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
    if rows is not None and len(rows) != len(residual.prefix):
        residual = Residual(residual.prefix[rows], tuple(x[rows] for x in residual.blocks))
    hidden = final_hidden(residual, weights, model.config, tap=tap)
    check_finite(hidden, model, None, "after the last norm")
    return hidden


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


def _run_layer(
    residual: Residual,
    model: Model,
    weights: Weights,
    layer: int,
    batches: Sequence[Tensor],
    *,
    tap: Tap | None,
    mlp_tap: Tap | None,
) -> Residual:
    # The layer's weights live no longer than this call: those of two layers never exist together.
    own = weights.layer(layer)
    prefix = f"layers.{layer}."
    residual = _attend(residual, own, model.config, layer, batches, tap=under(tap, prefix))
    check_finite(residual.prefix, model, layer, f"layer {layer}, after attention")

    def experts(wanted: Sequence[int]) -> Iterator[Mapping[str, Tensor]]:
        return weights.experts(layer, wanted)

    residual = mlp_half(
        residual, own, experts, model.config, layer, tap=under(tap or mlp_tap, prefix)
    )
    check_finite(residual.prefix, model, layer, f"layer {layer}, after its MLP")
    return residual


def _batch_tokens(config: K3Config) -> int:
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
) -> Residual:
    prefix, blocks = torch.empty_like(residual.prefix), residual.blocks
    segment = _batch_tokens(config)
    batch_tap: Tap | None = None
    if tap is not None:
        outer = tap
        batch_tap = lambda name, value: outer(name, value[0])  # noqa: E731  drops the batch of one
    for batch in batches:
        cache: LayerCache | None = None
        # Linear attention takes a long window in pieces; latent attention bounds itself.
        whole = tap is not None or config.layer_kinds[layer] is LayerKind.MLA
        for places in (batch,) if whole else torch.split(batch, segment, dim=1):
            # What fills up a row repeats the first token of all: any token will do.
            index = places.clamp(min=0)
            piece = Residual(residual.prefix[index], tuple(x[index] for x in residual.blocks))
            out, cache = attention_half(piece, weights, config, layer, cache=cache, tap=batch_tap)
            real = places >= 0
            prefix[places[real]] = out.prefix[real]
            if len(out.blocks) > len(residual.blocks):
                blocks = (*residual.blocks, residual.prefix)
    return Residual(prefix, blocks)


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
    found = count_non_finite(values)
    if not found:
        return
    guilty = model.find_non_finite(layer)
    because = "every weight there is finite"
    if guilty is not None:
        because = f"tensor {guilty[0]} holds {guilty[1]} such values"
    raise ValuesError(
        f"{where}: expected finite values, got {found} that are NaN or infinite; {because}",
        hint="`k3quant verify --level values` checks every tensor",
    )
