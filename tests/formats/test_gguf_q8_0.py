import pytest
import torch

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.gguf_q8_0 import dequantize_q8_0, quantize_q8_0


def _block(*values: float, amax: float = 127.0) -> torch.Tensor:
    """Return one block whose scale is amax / 127, `values` after the amax."""
    return torch.tensor([amax, *values, *[0.0] * (31 - len(values))])


def test_quantize_worked_example():
    assert bytes(quantize_q8_0(_block()).tolist()) == bytes.fromhex("003c7f") + bytes(31)


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.5, 1), (-0.5, -1), (0.49999997, 0), (2.5, 3), (-2.5, -3), (1.4999999, 1), (-126.5, -127)],
    ids="half minus-half below-half two-and-half minus-two-and-half below-tie largest-tie".split(),
)
def test_quantize_ties_away_from_zero(value, code):
    codes = quantize_q8_0(_block(value))[2:].view(torch.int8)
    assert codes[1].item() == code


def test_zero_block_has_scale_zero():
    blocks = quantize_q8_0(torch.zeros(64))
    assert blocks.tolist() == [0] * 68
    assert dequantize_q8_0(blocks).tolist() == [0.0] * 64


def test_stored_scale_is_float16_of_amax_over_127():
    weight = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    blocks = quantize_q8_0(weight).reshape(3, 3, 34)
    expected = (weight.reshape(3, 3, 32).abs().amax(-1) / 127).half()
    assert torch.equal(blocks[..., :2].contiguous().view(torch.float16)[..., 0], expected)


def test_round_trip_stays_within_half_a_step_and_the_scale_rounding():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    decoded = dequantize_q8_0(quantize_q8_0(weight))
    amax = weight.float().reshape(8, 8, 32).abs().amax(-1, keepdim=True)
    # Half a step of amax / 127, and 127 steps of a scale that is off by up to 2^-11.
    bound = amax * (0.5 / 127 + 2**-11)
    apart = (decoded - weight.float()).reshape(8, 8, 32).abs()
    assert bool((apart <= bound).all())
    assert float(apart.max()) > 0


def test_scale_below_float16_loses_the_block():
    blocks = quantize_q8_0(torch.full((32,), 1e-7))
    assert dequantize_q8_0(blocks).tolist() == [0.0] * 32


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf")], ids="nan inf -inf".split()
)
def test_not_finite_is_refused(bad):
    with pytest.raises(
        ValuesError, match="expected finite values, got NaN or infinity in 1 places"
    ):
        quantize_q8_0(_block(bad))


def test_scale_beyond_float16_is_refused():
    with pytest.raises(ValuesError, match="expected values that a float16 scale holds"):
        quantize_q8_0(_block(amax=65520.0 * 127))


@pytest.mark.parametrize("cols", [1, 31, 33], ids="one short long".split())
def test_ragged_columns_are_refused(cols):
    with pytest.raises(SchemaError, match=f"whole blocks of 32, got {cols}"):
        quantize_q8_0(torch.zeros(2, cols))
    with pytest.raises(SchemaError, match="whole blocks of 34"):
        dequantize_q8_0(torch.zeros(2, cols, dtype=torch.uint8))


def test_empty_keeps_its_shape():
    blocks = quantize_q8_0(torch.zeros(0, 64))
    assert blocks.shape == (0, 68)
    assert dequantize_q8_0(blocks).shape == (0, 64)


def test_bytes_are_those_of_the_gguf_package():
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(3)) * 3
    theirs = quants.quantize(weight.numpy(), constants.GGMLQuantizationType.Q8_0)
    assert quantize_q8_0(weight).numpy().tobytes() == theirs.tobytes()
