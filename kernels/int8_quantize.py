"""Floats to INT8 rows under amax / 127.5; reference: formats.int8_channel.quantize_int8_channel."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.int8_channel import INT8_DIVISOR
from k3quant.kernels.float_pairs import are_words, larger, largest_of_rows, load_pairs
from k3quant.kernels.rounding import divide, split_divisor

_PAIRS_AT_ONCE = 8192
_PAIRS_A_THREAD = 16


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to integers under amax / 127.5 of their row, ties to even.

    Args:
        weight: `[..., rows, cols]` float32, bfloat16 or float16, any size.

    Returns:
        `[..., rows, cols]` int8; `[..., rows, 1]` float32 scales, 1.0 for an all-zero row; and an
        int32 scalar that is 1 when a value is NaN or infinite, and the rest is then undefined.
    """
    weight = weight.contiguous()
    *lead, cols = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty((*lead, 1), dtype=torch.float32, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    if weight.numel():
        words = are_words(weight)
        pairs = min(_PAIRS_AT_ONCE, triton.next_power_of_2(triton.cdiv(cols, 2)))
        _quantize_int8_kernel[(scale.numel(),)](
            weight.view(torch.int32) if words else weight,
            codes.view(torch.int16) if words else codes,
            scale,
            fault,
            cols // 2 if words else cols,
            DIVISOR=INT8_DIVISOR,
            WORDS=words,
            SHORT=weight.dtype != torch.float32,
            FITS=2 * pairs >= cols,
            PAIRS=pairs,
            num_warps=max(4, min(16, pairs // (32 * _PAIRS_A_THREAD))),
        )
    return codes, scale, fault


@triton.jit
def _load_part(weight_ptr, part, cols, WORDS: tl.constexpr, PAIRS: tl.constexpr):
    """Load some columns of a row; return also where they are and which are live."""
    pair = part + tl.arange(0, PAIRS)[None, :]
    if WORDS:
        place, live, second_live = pair, pair < cols, pair < cols
    else:
        place, live, second_live = 2 * pair, 2 * pair < cols, 2 * pair + 1 < cols
    loaded = load_pairs(weight_ptr, place, live, second_live, WORDS)
    return loaded[0], loaded[1], loaded[3], place, live, second_live


@triton.jit
def _code(x, divisor, SHORT: tl.constexpr):
    """Return the nearest integer, ties to even, in the low byte of an int32."""
    ROUND: tl.constexpr = 1.5 * 2.0**23  # adding it leaves no bit after the point
    quotient = tl.minimum(divide(x, divisor[0], divisor[1], divisor[2], SHORT), 127.0)
    return (quotient + ROUND).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT):
    low, high = _code(first, divisor, SHORT), _code(second, divisor, SHORT)
    if WORDS:
        tl.store(codes_ptr + place, (low | (high << 8)).to(tl.int16), mask=live)
    else:
        tl.store(codes_ptr + place, low.to(tl.int8), mask=live)
        tl.store(codes_ptr + place + 1, high.to(tl.int8), mask=second_live)


@triton.jit
def _quantize_int8_kernel(
    weight_ptr,
    codes_ptr,
    scale_ptr,
    fault_ptr,
    cols,
    DIVISOR: tl.constexpr,
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    FITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * cols
    weight_ptr += start
    codes_ptr += start
    ALL_PAIRS = cols if WORDS else (cols + 1) // 2
    if FITS:
        # The row stays in registers between the choice of its scale and the division.
        first, second, magnitude, place, live, second_live = _load_part(
            weight_ptr, 0, cols, WORDS, PAIRS
        )
        bits = tl.max(largest_of_rows(magnitude, WORDS), axis=0)
    else:
        largest = tl.zeros((1, PAIRS), tl.uint32)
        for part in range(0, ALL_PAIRS, PAIRS):
            largest = larger(largest, _load_part(weight_ptr, part, cols, WORDS, PAIRS)[2], WORDS)
        bits = tl.max(largest_of_rows(largest, WORDS), axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(tl.div_rn(amax, amax * 0 + DIVISOR), 2.0**-126))
    divisor = split_divisor(scale)
    if FITS:
        _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT)
    else:
        for part in range(0, ALL_PAIRS, PAIRS):
            first, second, _, place, live, second_live = _load_part(
                weight_ptr, part, cols, WORDS, PAIRS
            )
            _store_part(codes_ptr, first, second, divisor, place, live, second_live, WORDS, SHORT)
    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(fault_ptr, 1, mask=bits >= 0x7F800000)
