"""Attention residuals: score, softmax and mix in one pass; reference: models.residual.mix_blocks.

A token's sources stream through once: their sum is kept relative to the largest score so far, so
nothing is read twice whatever the number of sources.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.fast_math import exp
from k3quant.kernels.rounding import to_dtype, to_float32

MAX_SOURCES = 9

# Tokens and warps of a program, sources in flight; measured on one H200 for 2, 5 and 9 sources.
_TOKENS = 16
_WARPS = 4
_STAGES = 4


def attn_res_mix(sources: Sequence[Tensor], norm: Tensor, proj: Tensor, *, eps: float) -> Tensor:
    """Average sources, weighted by a softmax over the scores of their norms.

    Args:
        sources: One to nine `[tokens, D]` of one float dtype.
        norm: `[D]` weight of the score's norm.
        proj: `[1, D]` projection to a score.
        eps: Of the score's norm.

    Returns:
        `[tokens, D]` in the dtype of the sources.

    Raises:
        ValueError: There are no sources or more than nine.

    Source: Kimi-K3 modelling code, attention residuals.
    """
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"sources: expected 1 to {MAX_SOURCES}, got {len(sources)}")
    sources = [source.contiguous() for source in sources]
    tokens, width = sources[0].shape
    out = torch.empty_like(sources[0])
    direction = norm.float() * proj.float().reshape(-1)
    unused = (sources[0],) * (MAX_SOURCES - len(sources))
    if out.numel():
        _attn_res_mix_kernel[(triton.cdiv(tokens, _TOKENS),)](
            *sources,
            *unused,
            direction,
            out,
            tokens,
            width,
            len(sources),
            eps,
            TOKENS=_TOKENS,
            STAGES=_STAGES,
            WIDTH=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )
    return out


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


# Neither number is compiled in: one kernel serves every block of every model.
@triton.jit(do_not_specialize=["tokens", "count"])
def _attn_res_mix_kernel(
    source0_ptr,
    source1_ptr,
    source2_ptr,
    source3_ptr,
    source4_ptr,
    source5_ptr,
    source6_ptr,
    source7_ptr,
    source8_ptr,
    direction_ptr,
    out_ptr,
    tokens,
    width,
    count,
    eps,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    col = tl.arange(0, WIDTH)
    live = col < width
    direction = tl.load(direction_ptr + col, mask=live, other=0)
    total = tl.zeros((WIDTH,), tl.float32)
    shares, peak = 0.0, float("-inf")
    first = tl.program_id(0) * TOKENS
    # The sources of one token and then of the next, so that some are always on their way.
    for step in tl.range(0, tl.minimum(TOKENS, tokens - first) * count, num_stages=STAGES):
        i = step % count
        place = (first + step // count).to(tl.int64) * width
        source_ptr = tl.where(i == 1, source1_ptr, source0_ptr)
        source_ptr = tl.where(i == 2, source2_ptr, source_ptr)
        source_ptr = tl.where(i == 3, source3_ptr, source_ptr)
        source_ptr = tl.where(i == 4, source4_ptr, source_ptr)
        source_ptr = tl.where(i == 5, source5_ptr, source_ptr)
        source_ptr = tl.where(i == 6, source6_ptr, source_ptr)
        source_ptr = tl.where(i == 7, source7_ptr, source_ptr)
        source_ptr = tl.where(i == 8, source8_ptr, source_ptr)
        x = to_float32(tl.load(source_ptr + place + col, mask=live, other=0))
        dot, square = tl.reduce((x * direction, x * x), 0, _add_both)
        score = dot * tl.rsqrt(square / width + eps)
        higher = tl.maximum(peak, score)
        fade, share = exp(peak - higher), exp(score - higher)
        total = total * fade + x * share
        shares = shares * fade + share
        peak = higher
        if i == count - 1:
            mixed = to_dtype(total * (1.0 / shares), out_ptr.dtype.element_ty)
            tl.store(out_ptr + place + col, mixed, mask=live)
            total = tl.zeros((WIDTH,), tl.float32)
            shares, peak = 0.0, float("-inf")
