from collections.abc import Callable

import pytest
import torch

from k3quant.formats import casts
from k3quant.kernels.mxfp4_to_mxfp8 import cast_mxfp4_to_mxfp8


@pytest.mark.parametrize("shape", [(16,), (3, 5, 48), (257, 16), (0, 32)], ids=str)
def test_every_byte_becomes_the_bytes_of_its_values(
    device: str, same_bits: Callable[..., bool], shape: tuple[int, ...]
) -> None:
    count = torch.Size(shape).numel()
    packed = torch.arange(count).to(torch.uint8).reshape(shape)  # wraps at 256
    scale_e8m0 = torch.full((*shape[:-1], shape[-1] // 16), 254, dtype=torch.uint8)
    codes, fault = cast_mxfp4_to_mxfp8(packed.to(device), scale_e8m0.to(device))
    assert same_bits(codes, casts.cast_mxfp4_to_mxfp8(packed, scale_e8m0)[0])
    assert not fault


def test_one_nan_scale_is_flagged(device: str) -> None:
    scale_e8m0 = torch.full((300, 2), 120, dtype=torch.uint8)
    scale_e8m0[299, 1] = 255
    packed = torch.zeros(300, 32, dtype=torch.uint8)
    assert cast_mxfp4_to_mxfp8(packed.to(device), scale_e8m0.to(device))[1]
