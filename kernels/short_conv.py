"""Causal depthwise convolution, SiLU and its state; reference: models.kda.short_convolution."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.fast_math import sigmoid
from k3quant.kernels.rounding import to_dtype, to_float32

_TOKENS = 32
_CHANNELS = 128
_WARPS = 4


def short_conv(u: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve each channel causally and take SiLU.

    Args:
        u: `[B, T, W]` raw inputs.
        weight: `[W, 1, J]`, the newest tap last.
        before: `[B, W, J]` last raw inputs before `u`; None is zeros.

    Returns:
        `[B, T, W]` in the dtype of `u`, accumulated in float32, and the last J raw inputs,
        `[B, W, J]`.

    Source: fla, ShortConvolution.
    """
    u, weight = u.contiguous(), weight.contiguous()
    before = None if before is None else before.contiguous()
    B, T, W = u.shape
    taps = weight.shape[-1]
    out = torch.empty_like(u)
    after = torch.empty((B, W, taps), dtype=u.dtype, device=u.device)
    if B * W:
        # At least one tile of tokens, so that the state is written even for no token.
        grid = (triton.cdiv(W, _CHANNELS), max(1, triton.cdiv(T, _TOKENS)), B)
        _short_conv_kernel[grid](
            u,
            weight,
            u if before is None else before,
            out,
            after,
            T,
            W,
            TAPS=taps,
            HAS_STATE=before is not None,
            TOKENS=_TOKENS,
            CHANNELS=_CHANNELS,
            num_warps=_WARPS,
        )
    return out, after


@triton.jit
def _raw_inputs(u_ptr, before_ptr, token, channel, T, W, TAPS: tl.constexpr, STATE: tl.constexpr):
    """Load inputs of tokens from -TAPS on, `[tokens, channels]` float32; zeros where none is."""
    live = (channel < W)[None, :]
    here = (token >= 0) & (token < T)
    place = token.to(tl.int64)[:, None] * W + channel[None, :]
    x = to_float32(tl.load(u_ptr + place, mask=live & here[:, None], other=0))
    if STATE:
        earlier = (token < 0) & (token >= -TAPS)
        place = channel[None, :] * TAPS + (token + TAPS)[:, None]
        old = tl.load(before_ptr + place, mask=live & earlier[:, None], other=0)
        x = tl.where(earlier[:, None], to_float32(old), x)
    return x


@triton.jit
def _short_conv_kernel(
    u_ptr,
    weight_ptr,
    before_ptr,
    out_ptr,
    after_ptr,
    T,
    W,
    TAPS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    window = tl.program_id(2).to(tl.int64)
    u_ptr += window * T * W
    out_ptr += window * T * W
    before_ptr += window * W * TAPS
    after_ptr += window * W * TAPS
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for j in tl.static_range(TAPS):
        tap = to_float32(tl.load(weight_ptr + channel * TAPS + j, mask=channel < W, other=0))
        x = _raw_inputs(u_ptr, before_ptr, token + (j + 1 - TAPS), channel, T, W, TAPS, HAS_STATE)
        total += x * tap[None, :]
    value = to_dtype(total * sigmoid(total), out_ptr.dtype.element_ty)
    place = token.to(tl.int64)[:, None] * W + channel[None, :]
    tl.store(out_ptr + place, value, mask=(token < T)[:, None] & (channel < W)[None, :])
    if tl.program_id(1) == tl.num_programs(1) - 1:
        for j in tl.static_range(TAPS):
            last = T - TAPS + j + tl.zeros((1,), tl.int32)
            kept = _raw_inputs(u_ptr, before_ptr, last, channel, T, W, TAPS, HAS_STATE)
            kept = to_dtype(tl.reshape(kept, (CHANNELS,)), after_ptr.dtype.element_ty)
            tl.store(after_ptr + channel * TAPS + j, kept, mask=channel < W)
