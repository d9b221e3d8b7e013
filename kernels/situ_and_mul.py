"""SiTU of gate and up projections in float32, rounded once; reference: models.situ.situ."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels.fast_math import exp2, reciprocal
from k3quant.kernels.rounding import to_dtype, to_float32

_ROWS = 2
_COLS = 1024
_WARPS = 2


def situ_and_mul(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Compute beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    Args:
        gate: `[rows, N]` float32, bfloat16 or float16; rows may lie apart, elements may not.
        up: `[rows, N]`, likewise and of the same dtype.
        beta: Bound of the gate's side.
        linear_beta: Bound of the linear side.

    Returns:
        `[rows, N]` in the dtype of `gate`.

    Source: Kimi-K3 modelling code, SiTU.
    """
    rows, cols = gate.shape
    out = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(cols, _COLS))
        _situ_and_mul_kernel[grid](
            gate,
            up,
            out,
            rows,
            cols,
            gate.stride(0),
            up.stride(0),
            BETA=beta,
            LINEAR_BETA=linear_beta,
            ROWS=_ROWS,
            COLS=_COLS,
            num_warps=_WARPS,
        )
    return out


@triton.jit
def _decay(x, RATE: tl.constexpr):
    """Return e^(-RATE |x|), at most 1."""
    return exp2(tl.abs(x) * (-1.4426950408889634 * RATE))


@triton.jit
def _bounded_parts(x, decay, BOUND: tl.constexpr):
    """Return numerator and denominator of BOUND * tanh(x / BOUND), given e^(-2 |x| / BOUND).

    Below a quarter of the bound a series of three terms is right to 4e-7, and the quotient of
    exponentials, which cancels there, above it.
    """
    SQUARE: tl.constexpr = 1.0 / (BOUND * BOUND)
    SMALL: tl.constexpr = 0.0625 * BOUND * BOUND
    FIRST: tl.constexpr = -1 / 3 * SQUARE
    SECOND: tl.constexpr = 2 / 15 * SQUARE * SQUARE
    THIRD: tl.constexpr = -17 / 315 * SQUARE * SQUARE * SQUARE
    square = x * x
    series = x + x * (square * (FIRST + square * (SECOND + square * THIRD)))
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    top = ((BOUND - BOUND * decay).to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    small = square < SMALL
    return tl.where(small, series, top), tl.where(small, 1.0, 1.0 + decay)


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """Compute SiTU of float32 tensors with a single division."""
    slow = _decay(gate, 2.0 / BETA)
    # K3's bound of 4 gives the sigmoid's exponential as a square, which is cheaper than another.
    fast = slow * slow if BETA == 4.0 else _decay(gate, 1.0)
    gate_top, gate_bottom = _bounded_parts(gate, slow, BETA)
    up_top, up_bottom = _bounded_parts(up, _decay(up, 2.0 / LINEAR_BETA), LINEAR_BETA)
    sigmoid_top = tl.where(gate < 0, fast, 1.0)
    return gate_top * sigmoid_top * up_top * reciprocal(gate_bottom * up_bottom * (1.0 + fast))


@triton.jit
def _situ_and_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    cols,
    stride_gate,
    stride_up,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    live = (row < rows) & (col < cols)
    gate = to_float32(tl.load(gate_ptr + row * stride_gate + col, mask=live, other=0))
    up = to_float32(tl.load(up_ptr + row * stride_up + col, mask=live, other=0))
    value = situ(gate, up, BETA, LINEAR_BETA)
    tl.store(out_ptr + row * cols + col, to_dtype(value, out_ptr.dtype.element_ty), mask=live)
