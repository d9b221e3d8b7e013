"""Arithmetic on words of two bfloat16, the first in the low half; reference: torch on bfloat16.

One instruction of the device works on both halves. The interpreter has no such instructions and
computes each half in float32.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from k3quant.kernels.rounding import INTERPRETED, to_bf16


@triton.jit
def multiply(a, b):
    """Multiply, each half rounded to nearest even.

    Args:
        a: Any shape, uint32.
        b: uint32, same shape or one that broadcasts.
    """
    if INTERPRETED:
        result = _word(_first(a) * _first(b), _second(a) * _second(b))
    else:
        result = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return result


@triton.jit
def multiply_add(a, b, c):
    """Compute a * b + c; the interpreter rounds sums that need more than 24 bits twice."""
    if INTERPRETED:
        result = _word(_first(a) * _first(b) + _first(c), _second(a) * _second(b) + _second(c))
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def larger(a, b):
    """Return the larger of each half, read as unsigned integers: right for magnitudes, NaN wins."""
    if INTERPRETED:
        result = tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000)
    else:
        result = tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return result


@triton.jit
def smaller(a, b):
    """Return the smaller of each half, read as unsigned integers."""
    if INTERPRETED:
        result = tl.minimum(a & 0xFFFF, b & 0xFFFF) | tl.minimum(a & 0xFFFF0000, b & 0xFFFF0000)
    else:
        result = tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return result


@triton.jit
def pack(first, second):
    """Round two float32 to a word."""
    if INTERPRETED:
        result = _word(first, second)
    else:
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [first, second],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _first(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _second(word):
    return (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _word(first, second):
    low = to_bf16(first).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (to_bf16(second).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
