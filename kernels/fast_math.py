"""Exponential and reciprocal, one instruction each; reference: torch.exp2 and division.

Both are within 2 units in the last place and flush subnormals, which triton's own spellings
spend several more instructions on.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from k3quant.kernels.rounding import INTERPRETED


@triton.jit
def exp2(x):
    """Return 2^x of float32."""
    if INTERPRETED:
        result = tl.exp2(tl.where(x > 127.0, 127.0, x))  # numpy warns beyond
    else:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def exp(x):
    """Return e^x of float32."""
    return exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """Return 1 / x of float32."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) of float32."""
    return reciprocal(1.0 + exp(-x))
