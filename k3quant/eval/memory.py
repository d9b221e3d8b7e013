"""What a walk holds in memory, and how many tokens therefore go in one pass."""

import math
from collections.abc import Iterator, Sequence

from k3quant.errors import ResourceError
from k3quant.eval.layer_step import BATCH_ELEMENTS
from k3quant.eval.windows import Window
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import layer_tensors
from k3quant.sizes import format_size

FLOAT_BYTES = 4
STORED_BYTES = 2  # of a layer's own weights, kept until they are no longer needed
# Activations of attention's width that are alive together: q, k, v before and after convolution,
# decay, gate, products of the delta rule, output.
ATTENTION_ACTIVATIONS = 14
# Activations of hidden width beside the stream: the new stream, an MLP's input and output, a norm.
STREAM_ACTIVATIONS = 5


def bytes_per_token(config: K3Config) -> int:
    """Return the bytes that a token holds while its layer runs: its stream and its MLP's ends."""
    every = config.attn_res_block_size
    blocks = 0 if every is None else -(-config.num_hidden_layers // every)
    hidden = (1 + blocks + STREAM_ACTIVATIONS) * config.hidden_size
    return FLOAT_BYTES * (hidden + 3 * config.expert_width + config.moe.num_experts)


def fixed_bytes(config: K3Config) -> int:
    """Return the bytes that do not grow with the tokens: a layer's weights, its activations."""
    kinds = {(config.layer_kinds[i], config.is_moe(i)): i for i in range(config.num_hidden_layers)}
    weights = max(
        sum(
            math.prod(spec.shape)
            for spec in layer_tensors(config, layer, packed=config.packed_experts)
            if spec.expert is None
        )
        for layer in kinds.values()
    )
    activations = ATTENTION_ACTIVATIONS * BATCH_ELEMENTS
    return STORED_BYTES * weights + FLOAT_BYTES * (weights + activations)


def plan_passes(
    windows: Sequence[Window],
    config: K3Config,
    *,
    ram_bytes: int | None,
    ahead_bytes: int,
    walks: int = 1,
    streams: int | None = None,
) -> Iterator[list[Window]]:
    """Split windows into passes that fit a budget; each pass reads the checkpoint once.

    Args:
        windows: All windows.
        config: The config.
        ram_bytes: The budget; None puts all windows into one pass.
        ahead_bytes: Bytes that are read ahead, by all walks together.
        walks: Models that are walked in lockstep.
        streams: Residual streams that they hold together; None is one for each walk.

    Raises:
        ResourceError: Not even the longest window fits.
    """
    if ram_bytes is None:
        yield list(windows)
        return
    fixed = ahead_bytes + walks * fixed_bytes(config)
    each = (streams or walks) * bytes_per_token(config)
    tokens = max(0, ram_bytes - fixed) // each
    longest = max(len(window.inputs) for window in windows)
    if longest > tokens:
        raise ResourceError(
            f"ram: expected at least {format_size(fixed + longest * each)} for a window of "
            f"{longest} tokens, got {format_size(ram_bytes)}",
            hint="raise the budget, shorten the context or read less ahead",
        )
    current: list[Window] = []
    held = 0
    for window in windows:
        if held + len(window.inputs) > tokens:
            yield current
            current, held = [], 0
        current.append(window)
        held += len(window.inputs)
    yield current
