import pytest
import torch

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.casts import cast_mxfp4_to_bf16, cast_mxfp4_to_mxfp8
from k3quant.formats.e2m1 import decode_e2m1, unpack_nibbles
from k3quant.formats.e4m3 import decode_e4m3
from k3quant.formats.mxfp4 import dequantize_mxfp4
from k3quant.formats.mxfp8 import dequantize_mxfp8


def test_bf16_holds_every_value(random_mxfp4):
    weight, counts = cast_mxfp4_to_bf16(*random_mxfp4)
    packed, scale = random_mxfp4
    exact = decode_e2m1(unpack_nibbles(packed), torch.float64).view(48, 8, 32)
    exact = exact * torch.exp2(scale.double() - 127)[..., None]
    assert torch.equal(weight.double(), exact.view(48, 256))
    assert counts == CastCounts(blocks=384, exact=384)
    assert counts.lossless


def test_bf16_names_the_block_that_overflows():
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 127], [127, 254]], dtype=torch.uint8)
    packed[1, 20] = 0x60
    with pytest.raises(ValuesError, match=r"row 1, block 1: .* infinity under scale 254"):
        cast_mxfp4_to_bf16(packed, scale)


def test_mxfp8_holds_every_code_under_every_byte():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    packed = packed.repeat(255, 1, 1)
    scale = torch.arange(255, dtype=torch.int32).to(torch.uint8).view(255, 1, 1).repeat(1, 16, 1)
    codes, new_scale, counts = cast_mxfp4_to_mxfp8(packed, scale)
    assert torch.equal(new_scale, scale)
    ours, theirs = decode_e4m3(codes), decode_e2m1(unpack_nibbles(packed))
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.signbit(ours), torch.signbit(theirs))
    assert counts == CastCounts(blocks=255 * 16, exact=255 * 16)


def test_mxfp8_dequantizes_to_the_same_weight(random_mxfp4):
    codes, scale, _ = cast_mxfp4_to_mxfp8(*random_mxfp4)
    assert torch.equal(dequantize_mxfp8(codes, scale), dequantize_mxfp4(*random_mxfp4))


def test_mxfp8_refuses_nan_scales():
    with pytest.raises(ValuesError, match="row 0, block 0"):
        cast_mxfp4_to_mxfp8(
            torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)
        )


def test_mxfp8_refuses_scale_grids_that_would_broadcast():
    with pytest.raises(SchemaError, match=r"expected \[4, 2\]"):
        cast_mxfp4_to_mxfp8(
            torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
        )


def test_counts_add_up():
    total = CastCounts(blocks=3, exact=2, rescued=1, saturated=5, flushed=7) + CastCounts(
        blocks=1, exact=1
    )
    assert total == CastCounts(blocks=4, exact=3, rescued=1, saturated=5, flushed=7)
    assert not total.lossless
