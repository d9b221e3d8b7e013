import numpy as np
import pytest
import torch

from k3quant.formats import cast_nvfp4, fast_stats, mxfp4
from k3quant.kernels.mxfp4_statistics import count_mxfp4, count_scale_needs


def mixed_mxfp4(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (rows, 48), dtype=torch.uint8, generator=generator)
    packed[: rows // 2] &= 0x99  # zeros and halves
    packed[: rows // 4, 8:24] = 0x80
    scales = torch.randint(90, 140, (rows, 3), dtype=torch.uint8, generator=generator)
    return packed, scales


@pytest.mark.parametrize("rows", [0, 1, 200], ids=str)
def test_counts_are_the_references(device: str, rows: int) -> None:
    packed, scale_e8m0 = mixed_mxfp4(rows)
    counts = count_mxfp4(packed.to(device), scale_e8m0.to(device))
    expected = fast_stats.count_mxfp4(packed.numpy(), scale_e8m0.numpy())
    assert np.array_equal(counts.scales.cpu(), expected.scales)
    assert np.array_equal(counts.bytes.cpu(), expected.bytes)
    assert int(counts.zero_blocks) == expected.zero_blocks
    values = mxfp4.dequantize_mxfp4(packed, scale_e8m0, dtype=torch.float32)
    assert float(counts.amax) == (float(values.abs().max()) if rows else 0.0)


def test_nan_scales_are_counted_and_have_no_magnitude(device: str) -> None:
    packed = torch.full((2, 16), 0x77, dtype=torch.uint8, device=device)
    scale_e8m0 = torch.tensor([[255], [0]], dtype=torch.uint8, device=device)
    counts = count_mxfp4(packed, scale_e8m0)
    assert counts.scales[255] == 1
    assert float(counts.amax) == 6 * 2.0**-127


@pytest.mark.parametrize("rows", [0, 1, 200], ids=str)
def test_scale_needs_are_the_references(device: str, rows: int) -> None:
    packed, scale_e8m0 = mixed_mxfp4(rows)
    needs = count_scale_needs(packed.to(device), scale_e8m0.to(device))
    assert np.array_equal(needs.cpu(), cast_nvfp4.count_scale_needs(packed, scale_e8m0))
