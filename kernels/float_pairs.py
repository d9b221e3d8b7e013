"""Read floats two by two, with their magnitudes; reference: torch's casts to float32 and abs.

Two bfloat16 are read as one word, whose magnitudes stay together until one maximum is left.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels import bf16_pairs
from k3quant.kernels.rounding import to_float32


def are_words(tensor: Tensor) -> bool:
    """Return whether pairs along the last dimension can be read as words."""
    return tensor.dtype == torch.bfloat16 and tensor.shape[-1] % 2 == 0


@triton.jit
def load_pairs(ptr, pair, first_live, second_live, WORDS: tl.constexpr):
    """Load neighbours.

    Args:
        ptr: To words of two bfloat16 where `WORDS`, else to floats of any dtype.
        pair: Index of the word, or of the pair's first float.
        first_live: Which pairs are there; others are zeros.
        second_live: Which pairs have a second float; not looked at where `WORDS`.
        WORDS: Whether pairs are words.

    Returns:
        Both as float32; the signs at bits 15 and 31; and magnitudes for `largest_of_rows`, uint32.
    """
    if WORDS:
        words = tl.load(ptr + pair, mask=first_live, other=0).to(tl.uint32, bitcast=True)
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        signs, magnitude = words, words & 0x7FFF7FFF
    else:
        first = to_float32(tl.load(ptr + pair, mask=first_live, other=0))
        second = to_float32(tl.load(ptr + pair + 1, mask=second_live, other=0))
        one, other = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
        signs = ((one >> 16) & 0x8000) | (other & 0x80000000)
        magnitude = tl.maximum(one & 0x7FFFFFFF, other & 0x7FFFFFFF)
    return first, second, signs, magnitude


@triton.jit
def larger(a, b, WORDS: tl.constexpr):
    """Return the larger of magnitudes, element by element."""
    return bf16_pairs.larger(a, b) if WORDS else tl.maximum(a, b)


@triton.jit
def largest_of_rows(magnitude, WORDS: tl.constexpr):
    """Return the largest magnitude of each row of pairs, as the int32 bits of its float32.

    NaN is larger than infinity, and infinity is 0x7F800000.
    """
    if WORDS:
        largest = tl.reduce(magnitude, 1, bf16_pairs.larger)
        largest = tl.maximum(largest & 0xFFFF0000, largest << 16)
    else:
        largest = tl.max(magnitude, axis=1)
    return largest.to(tl.int32, bitcast=True)
