import numpy as np
import pytest
import torch

from k3quant.errors import ValuesError
from k3quant.formats.fast_bf16_fp8 import quantize_bf16_to_fp8
from k3quant.formats.fp8_block import quantize_fp8_block

RNG = np.random.default_rng(4)
FINITE = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
FINITE = FINITE[(FINITE & 0x7FFF) < 0x7F80]
SIGNS = (RNG.integers(0, 2, len(FINITE)) << 15).astype(np.uint16)
WEIGHTS = {
    "mixed": RNG.permutation(FINITE)[: 255 * 255].reshape(255, 255),
    "by-value": (np.sort(FINITE & 0x7FFF) | SIGNS)[: 255 * 255].reshape(255, 255),
    "normal": (RNG.standard_normal((255, 255)).astype("f4").view("u4") >> 16).astype("u2"),
    "zero": np.zeros((130, 5), np.uint16),
    "one-element": np.array([[0xC040]], np.uint16),
}


@pytest.mark.parametrize("block_shape", [(128, 128), (1, 255), (3, 7)], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_tiles_are_the_references(weight, block_shape):
    codes, scale = quantize_bf16_to_fp8(weight, block_shape=block_shape)
    tensor = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    theirs = quantize_fp8_block(tensor, block_shape=block_shape)
    assert np.array_equal(scale, theirs[1].numpy())
    assert np.array_equal(codes, theirs[0].numpy())


def test_threads_change_nothing():
    weight = np.tile(WEIGHTS["normal"], (4, 4))
    one, many = (quantize_bf16_to_fp8(weight, threads=threads) for threads in (1, 3))
    assert np.array_equal(one[0], many[0])
    assert np.array_equal(one[1], many[1])


def test_output_goes_into_the_buffer_that_was_given():
    out = np.full((255, 255), 0x7F, np.uint8)
    assert quantize_bf16_to_fp8(WEIGHTS["normal"], out=out)[0] is out
    assert not (out & 0x7F == 0x7F).any()
    with pytest.raises(ValueError, match=r"expected contiguous uint8 \[255, 255\]"):
        quantize_bf16_to_fp8(WEIGHTS["normal"], out=np.empty((255, 254), np.uint8))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=hex)
def test_values_no_scale_can_hold_are_refused_by_tile(bits):
    weight = np.zeros((130, 300), np.uint16)
    weight[129, 200] = bits
    with pytest.raises(ValuesError, match=r"tile \[1, 1\]: expected finite values"):
        quantize_bf16_to_fp8(weight)
