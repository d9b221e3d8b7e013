"""The one-instruction helpers against plain torch: CI runs their spelled-out interpreter form."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from k3quant.kernels import bf16_pairs, fast_math
from k3quant.kernels.nibble_table import look_up


@triton.jit
def _pairs_kernel(a_ptr, b_ptr, c_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b, c = tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(c_ptr + i)
    a, b = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    if OP == "multiply":
        out = bf16_pairs.multiply(a, b)
    elif OP == "multiply_add":
        out = bf16_pairs.multiply_add(a, b, c.to(tl.uint32, bitcast=True))
    elif OP == "larger":
        out = bf16_pairs.larger(a, b)
    else:
        out = bf16_pairs.smaller(a, b)
    tl.store(out_ptr + i, out.to(tl.int32, bitcast=True))


@triton.jit
def _table_kernel(words_ptr, first_ptr, second_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    words = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    low, high = tl.full((1,), 0x3C383000, tl.uint32), tl.full((1,), 0x4C484440, tl.uint32)
    first, second = look_up(words, low, high)
    tl.store(first_ptr + i, first.to(tl.int32, bitcast=True))
    tl.store(second_ptr + i, second.to(tl.int32, bitcast=True))


@triton.jit
def _math_kernel(x_ptr, exp_ptr, reciprocal_ptr, sigmoid_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(exp_ptr + i, fast_math.exp(x))
    tl.store(reciprocal_ptr + i, fast_math.reciprocal(x))
    tl.store(sigmoid_ptr + i, fast_math.sigmoid(x))


def bfloat16_near_one(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4096, generator=generator)
    return (values * torch.exp2(torch.randint(-3, 4, (4096,), generator=generator))).bfloat16()


@pytest.mark.parametrize("op", ["multiply", "multiply_add", "larger", "smaller"])
def test_both_halves_are_torchs(device: str, same_bits: Callable[..., bool], op: str) -> None:
    a, b, c = (bfloat16_near_one(seed) for seed in (22, 23, 24))
    if op in {"larger", "smaller"}:
        a, b = a.abs(), b.abs()
    out = torch.empty(4096, dtype=torch.bfloat16, device=device)
    words = [x.to(device).view(torch.int32) for x in (a, b, c)]
    _pairs_kernel[(1,)](*words, out.view(torch.int32), OP=op, SIZE=2048)
    expected = {
        "multiply": a.double() * b.double(),
        "multiply_add": a.double() * b.double() + c.double(),
        "larger": torch.maximum(a, b),
        "smaller": torch.minimum(a, b),
    }[op]
    assert same_bits(out, expected.bfloat16())


def test_products_keep_subnormals(device: str, same_bits: Callable[..., bool]) -> None:
    a = torch.arange(1, 4097, dtype=torch.int16).view(torch.bfloat16)  # subnormals up to 127
    b = torch.full_like(a, 2.0)
    out = torch.empty_like(a, device=device)
    words = [x.to(device).view(torch.int32) for x in (a, b, b)]
    _pairs_kernel[(1,)](*words, out.view(torch.int32), OP="multiply", SIZE=2048)
    assert same_bits(out, (a.double() * 2).bfloat16())


def test_every_nibble_at_every_place(device: str, same_bits: Callable[..., bool]) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(8).view(8, 256).T.contiguous().view(-1)
    packed = torch.cat((packed, packed.roll(1), packed.roll(2), packed.roll(3)))
    words = packed.view(torch.int32).to(device)
    first, second = torch.empty_like(words), torch.empty_like(words)
    _table_kernel[(1,)](words, first, second, SIZE=2048)
    table = torch.tensor([0, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], dtype=torch.uint8)
    table = torch.cat((table, table | 0x80))
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).view(-1, 8)
    expected = table[nibbles.int()].view(torch.int32)
    assert same_bits(first, expected[:, 0].contiguous())
    assert same_bits(second, expected[:, 1].contiguous())


def test_approximations_are_within_two_units(device: str) -> None:
    x = torch.linspace(-80, 80, 4096).to(device)
    exp, reciprocal, sigmoid = (torch.empty_like(x) for _ in range(3))
    _math_kernel[(1,)](x, exp, reciprocal, sigmoid, SIZE=4096)
    exact = x.double()
    # The argument of 2^x carries a rounding that grows with it: 80 / ln 2 has 7 bits before it.
    assert torch.allclose(exp.double(), exact.exp(), rtol=2e-5, atol=0)
    assert torch.allclose(reciprocal.double(), 1 / exact, rtol=3e-7, atol=0)
    assert torch.allclose(sigmoid.double(), exact.sigmoid(), rtol=2e-5, atol=0)
