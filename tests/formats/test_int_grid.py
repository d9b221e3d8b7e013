import numpy as np
import pytest
import torch

from k3quant.formats.blocks import scale_of_amax
from k3quant.formats.int_grid import (
    INT8_GRID,
    Int4Range,
    scales_of,
    store_scales,
    widen_scales,
)

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Every finite positive float32 with 12 bits of mantissa, bfloat16's ties among them, and beside it
BITS = np.arange(0x7F80 << 5, dtype=np.uint32) << 11
AMAX = np.concatenate([BITS, BITS | 1]).view(np.float32)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("divisor", [7.0, 7.5, 127.5])
def test_scales_are_the_references(divisor, dtype):
    scale = scale_of_amax(torch.from_numpy(AMAX), divisor)
    scale = scale.clamp(min=torch.finfo(TORCH_DTYPES[dtype]).tiny).to(TORCH_DTYPES[dtype])
    ours = scales_of(AMAX, divisor, dtype)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, scale.float().numpy())
    assert ours[0] == 1.0


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_stored_scales_have_the_bits_of_their_type(dtype):
    stored = store_scales(AMAX, dtype)
    theirs = torch.from_numpy(AMAX).to(TORCH_DTYPES[dtype])
    width = np.int32 if dtype == "F32" else np.int16
    bits = theirs.view(torch.int32 if dtype == "F32" else torch.int16).numpy()
    assert np.array_equal(stored.view(width), bits)
    assert np.array_equal(widen_scales(stored, dtype), theirs.float().numpy())


@pytest.mark.parametrize(
    ("grid", "expected"),
    [(Int4Range.FULL.grid, (7.5, -8, 7, 4)), (Int4Range.BALANCED.grid, (7.0, -7, 7, 4)),
     (INT8_GRID, (127.5, -128, 127, 8))],
    ids=["full", "balanced", "int8"],
)  # fmt: skip
def test_grids_are_symmetric_about_zero(grid, expected):
    assert grid == expected
