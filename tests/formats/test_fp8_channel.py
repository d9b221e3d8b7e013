import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats.fp8_channel import dequantize_fp8_channel, quantize_fp8_channel


@pytest.mark.parametrize("peer", ["compressed_tensors", "torchao", "modelopt"])
def test_golden_rows_agree_with(golden, peer):
    # Row 0 is all zero: the peers write a scale near zero, or NaN codes from 0 / 0.
    codes, scale = quantize_fp8_channel(golden["fp8.x_f32"][1:])
    assert torch.equal(scale, golden[f"fp8_channel.{peer}.f32.scale"][1:])
    assert torch.equal(codes, golden[f"fp8_channel.{peer}.f32.codes"][1:])


def test_zero_row_has_scale_one_and_zero_codes(golden):
    codes, scale = quantize_fp8_channel(golden["fp8.x_f32"][:1])
    assert scale.tolist() == [[1.0]]
    assert not bool((codes & 0x7F).any())


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 33), (4, 1)], ids=str)
def test_one_scale_a_row(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    codes, scale = quantize_fp8_channel(weight)
    assert scale.shape == (*shape[:-1], 1)
    assert torch.equal(scale, weight.abs().amax(-1, keepdim=True) / 448)
    back = dequantize_fp8_channel(codes, scale, dtype=torch.float32)
    assert bool(((back - weight).abs() <= (weight.abs() / 15.9).clamp(min=1e-4)).all())


def test_scales_of_other_shapes_are_refused():
    with pytest.raises(SchemaError, match=r"expected \[4, 1\], got \[1, 1\]"):
        dequantize_fp8_channel(torch.zeros(4, 8, dtype=torch.uint8), torch.ones(1, 1))
