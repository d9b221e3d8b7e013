"""The references give the same bits on a CUDA device as on the processor."""

import pytest
import torch
from torch import Tensor

from k3quant.formats.cast_fp8 import cast_mxfp4_to_fp8
from k3quant.formats.cast_nvfp4 import cast_mxfp4_to_nvfp4, count_scale_needs
from k3quant.formats.casts import cast_mxfp4_to_mxfp8
from k3quant.formats.e2m1 import encode_e2m1
from k3quant.formats.e4m3 import decode_e4m3, encode_e4m3
from k3quant.formats.fp8_block import quantize_fp8_block
from k3quant.formats.gguf_mxfp4 import pack_gguf_mxfp4
from k3quant.formats.int4 import Int4Range, quantize_int4
from k3quant.formats.int8_channel import quantize_int8_channel
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3quant.formats.mxfp8 import quantize_mxfp8
from k3quant.formats.nvfp4 import GlobalConvention, global_scale_of_amax, quantize_nvfp4

pytestmark = pytest.mark.gpu


def by_value() -> Tensor:
    """Every finite bfloat16 but the last few, by magnitude, so that blocks have narrow ranges."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    bits = bits[(bits & 0x7FFF) < 0x7F80].to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[values.float().abs().argsort(stable=True)].view(-1, 64)


def normal(scale: float) -> Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(9)) * scale


WEIGHTS = {"every-bfloat16": by_value(), "normal": normal(1.0), "subnormal": normal(2.0**-126)}


def divide(weight: Tensor, convention: GlobalConvention) -> tuple[Tensor, Tensor]:
    amax = float(weight.float().abs().max())
    return quantize_nvfp4(weight, global_scale_of_amax(amax, convention))


QUANTIZERS = {
    **{f"mxfp4-{r}": lambda w, r=r: quantize_mxfp4(w, r) for r in ScaleRounding},
    **{f"mxfp8-{r}": lambda w, r=r: quantize_mxfp8(w, r) for r in ScaleRounding},
    **{f"nvfp4-{c}": lambda w, c=c: divide(w, c) for c in GlobalConvention},
    **{f"int4-{g}": lambda w, g=g: quantize_int4(w, group_size=32, grid=g) for g in Int4Range},
    "int4-bf16": lambda w: quantize_int4(
        w, group_size=32, grid=Int4Range.BALANCED, scale_dtype=torch.bfloat16
    ),
    "fp8-block": quantize_fp8_block,
    "int8-channel": quantize_int8_channel,
    "e2m1": lambda w: (encode_e2m1(w),),
    "e4m3": lambda w: (encode_e4m3(w),),
}


@pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_quantize(quantize, weight):
    for here, there in zip(quantize(weight), quantize(weight.cuda()), strict=True):
        assert there.is_cuda
        assert torch.equal(here, there.cpu())


def every_byte() -> tuple[Tensor, Tensor]:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, 16)
    return packed, scale


CASTS = {
    "float32": lambda p, s: (dequantize_mxfp4(p, s, dtype=torch.float32),),
    "bfloat16": lambda p, s: (dequantize_mxfp4(p, s),),
    "mxfp8": lambda p, s: cast_mxfp4_to_mxfp8(p, s)[:2],
    "nvfp4": lambda p, s: cast_mxfp4_to_nvfp4(p, s, exponent=0)[:2],
    "fp8": lambda p, s: cast_mxfp4_to_fp8(p, s)[:2],
    "gguf": lambda p, s: (pack_gguf_mxfp4(p, s),),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_cast(cast):
    packed, scale = every_byte()
    for here, there in zip(cast(packed, scale), cast(packed.cuda(), scale.cuda()), strict=True):
        assert there.is_cuda
        assert torch.equal(here, there.cpu())


def test_needs():
    packed, scale = every_byte()
    assert (
        count_scale_needs(packed, scale) == count_scale_needs(packed.cuda(), scale.cuda())
    ).all()


def test_e4m3_decode():
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    here, there = decode_e4m3(byte), decode_e4m3(byte.cuda()).cpu()
    assert torch.equal(here.nan_to_num(nan=1e9), there.nan_to_num(nan=1e9))
