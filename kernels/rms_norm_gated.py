"""Norm, weight and sigmoid gate with one rounding; reference: models.norms.gated_rms_norm."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.fast_math import sigmoid
from k3quant.kernels.rounding import to_dtype, to_float32

_ELEMENTS = 4096
_WARPS = 4


def rms_norm_gated(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """Norm, weigh and multiply by sigmoid(gate).

    Args:
        x: `[rows, D]` floating.
        weight: `[D]`.
        gate: `[rows, D]` before the sigmoid; its dtype is the result's.
        eps: Added to the mean square.

    Returns:
        `[rows, D]` in the dtype of `gate`.

    Source: fla, FusedRMSNormGated with a sigmoid gate.
    """
    x, gate = x.contiguous(), gate.contiguous()
    rows, width = x.shape
    out = torch.empty_like(gate)
    if out.numel():
        padded = triton.next_power_of_2(width)
        at_once = max(1, _ELEMENTS // padded)
        _rms_norm_gated_kernel[(triton.cdiv(rows, at_once),)](
            x, weight, gate, out, rows, width, eps, ROWS=at_once, WIDTH=padded, num_warps=_WARPS
        )
    return out


@triton.jit
def _rms_norm_gated_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    rows,
    width,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, WIDTH)
    live = (row < rows) & (col < width)[None, :]
    place = row * width + col[None, :]
    x = to_float32(tl.load(x_ptr + place, mask=live, other=0))
    gate = to_float32(tl.load(gate_ptr + place, mask=live, other=0))
    weight = to_float32(tl.load(weight_ptr + col, mask=col < width, other=0))[None, :]
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    value = x * scale * weight * sigmoid(gate)
    tl.store(out_ptr + place, to_dtype(value, out_ptr.dtype.element_ty), mask=live)
