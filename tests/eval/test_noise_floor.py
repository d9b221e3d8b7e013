import pytest
import torch
from torch.nn.functional import linear

from k3quant.errors import UsageError
from k3quant.eval.noise_floor import OtherOrder
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings


def _settings(dtype):
    return EvalSettings(ctx=32, dtype=dtype, noise_floor=True)


def test_floor_is_rounding_of_the_dtype(nano, write_ids, some_ids):
    path = write_ids(some_ids(129).tolist())
    found = {
        dtype: evaluate(nano, tokens=path, reference=nano, settings=_settings(dtype)).divergence
        for dtype in ("float32", "bfloat16")
    }
    fine, coarse = found["float32"].noise_floor, found["bfloat16"].noise_floor
    assert 0 < fine.kld_mean < 1e-6
    assert 1e-6 < coarse.kld_mean < 1e-1
    assert fine.kld_mean <= fine.kld_p99 <= fine.kld_max
    assert all(0 < gap.rel_error < 1e-4 for gap in fine.layers)
    assert all(1e-5 < gap.rel_error < 0.5 for gap in coarse.layers)
    # The candidate is the reference itself: its own KL stays exactly zero.
    assert found["bfloat16"].kld_mean == 0
    assert found["bfloat16"].to_json()["noise_floor"].keys() == {
        "kld_mean", "kld_p99", "kld_max", "top1_agreement", "layers"
    }  # fmt: skip


def test_a_floor_without_a_reference_is_refused(nano, write_ids):
    with pytest.raises(UsageError, match="noise floor: expected a reference"):
        evaluate(nano, tokens=write_ids([1, 2, 3]), settings=_settings("float32"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_other_order_is_the_same_product_up_to_rounding(dtype):
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 4096, generator=rng).to(dtype) for _ in range(2))
    plain = linear(x, weight)
    with OtherOrder():
        other = linear(x, weight)
        assert torch.equal(x + x, 2 * x)
    assert other.dtype is dtype
    assert not torch.equal(plain, other)
    exact = x.double() @ weight.double().T
    assert (other - exact).norm() <= 1.05 * (plain - exact).norm() + 1e-6 * exact.norm()
    assert torch.equal(linear(x, weight), plain)
