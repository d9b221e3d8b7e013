"""KDA over long windows with fla's chunked kernels; reference: models.delta_rule.

One call of fla holds some 300 KB of scratch a token for K3's heads, so a window is cut into
segments and the recurrent state is handed from one to the next.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCRATCH_BYTES = 4 << 30

# Bytes fla holds for each token, head and channel, measured with fla-core 0.6 on one H200.
_SCRATCH_PER_CHANNEL = 20
_CHUNK_TOKENS = 64


class KdaSegment(NamedTuple):
    """The result of one segment.

    Attributes:
        tokens: Which tokens of the window.
        o: `[B, tokens, H, V]` in the dtype of `v`.
        state: `[B, H, K, V]` float32, after the segment's last token.
    """

    tokens: slice
    o: Tensor
    state: Tensor


@cache
def is_available() -> bool:
    """Return whether fla is installed (the extra `gpu`)."""
    return find_spec("fla") is not None


def segment_tokens(windows: int, heads: int, channels: int, scratch_bytes: int) -> int:
    """Return how many tokens a segment may have, a positive multiple of fla's chunk.

    Args:
        windows: B.
        heads: H.
        channels: K.
        scratch_bytes: What one call may hold.
    """
    per_token = windows * heads * channels * _SCRATCH_PER_CHANNEL
    return max(1, scratch_bytes // per_token // _CHUNK_TOKENS) * _CHUNK_TOKENS


def kda_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    bounded: bool,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Iterator[KdaSegment]:
    """Run the recurrence a segment at a time.

    Args:
        q: `[B, T, H, K]` bfloat16, scaled.
        k: `[B, T, H, K]` bfloat16.
        v: `[B, T, H, V]` bfloat16.
        log_decay: `[B, T, H, K]` float32, at most 0.
        beta: `[B, T, H]` float32.
        state: `[B, H, K, V]` float32; None is zeros.
        bounded: Whether no log decay is below -5, which allows a faster kernel.
        scratch_bytes: Upper bound of fla's scratch, as long as a segment has one chunk.

    Yields:
        Each segment in order.

    Source: fla, ops/kda/chunk.py.
    """
    chunk_kda = _chunk_kda()
    B, T, H, K = q.shape
    step = segment_tokens(B, H, K, scratch_bytes)
    for first in range(0, T, step):
        tokens = slice(first, min(first + step, T))
        o, state = chunk_kda(
            q[:, tokens].contiguous(),
            k[:, tokens].contiguous(),
            v[:, tokens].contiguous(),
            log_decay[:, tokens].contiguous(),
            beta[:, tokens].contiguous(),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
            safe_gate=bounded,
        )
        assert state is not None
        yield KdaSegment(tokens, o, state)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    bounded: bool,
    scratch_bytes: int = SCRATCH_BYTES,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a window; arguments as `kda_segments`, at least one token.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v` and the state after the last token,
        `[B, H, K, V]` float32.
    """
    out: Tensor | None = None
    for segment in kda_segments(
        q, k, v, log_decay, beta, state, bounded=bounded, scratch_bytes=scratch_bytes
    ):
        state = segment.state
        if segment.o.shape == v.shape:
            return segment.o, state
        out = torch.empty_like(v) if out is None else out
        out[:, segment.tokens] = segment.o
    assert out is not None
    assert state is not None
    return out, state


def _chunk_kda() -> Callable[..., Any]:
    from fla.ops.kda import chunk_kda

    return chunk_kda  # type: ignore[no-any-return]  # fla has no types
