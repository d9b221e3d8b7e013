import pytest
import torch

from k3quant.kernels.float_statistics import count_floats

DTYPES = [
    pytest.param(torch.float32, torch.int32, 23, id="float32"),
    pytest.param(torch.bfloat16, torch.int16, 7, id="bfloat16"),
    pytest.param(torch.float16, torch.int16, 10, id="float16"),
]


@pytest.mark.parametrize(("dtype", "word", "fraction"), DTYPES)
@pytest.mark.parametrize("count", [1, 2500, 5001], ids=str)
def test_counts_are_torchs(
    device: str, dtype: torch.dtype, word: torch.dtype, fraction: int, count: int
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(6)).to(dtype)
    if count > 1:
        values[[3, 2000]] = float("nan")
        values[7], values[9], values[11] = float("inf"), -float("inf"), -0.0
    counts = count_floats(values.to(device))
    assert int(counts.nan) == int(torch.isnan(values).sum())
    assert int(counts.inf) == int(torch.isinf(values).sum())
    assert int(counts.zeros) == int((values == 0).sum())
    assert float(counts.amax) == float(values[torch.isfinite(values)].abs().max())
    width = dtype.itemsize * 8 - 1 - fraction
    fields = (values.view(word).long() >> fraction) & ((1 << width) - 1)
    assert torch.equal(counts.exponents.cpu(), torch.bincount(fields, minlength=256))


def test_nothing_is_no_number(device: str) -> None:
    counts = count_floats(torch.zeros(0, device=device))
    assert int(counts.exponents.sum()) == 0
    assert float(counts.amax) == 0.0
