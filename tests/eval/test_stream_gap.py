import pytest
import torch

from k3quant.eval.stream_gap import Gap, gap_of, gap_sums


def _gap(reference, candidate):
    return gap_of(gap_sums(torch.tensor([reference]), torch.tensor([candidate])).tolist())


def test_gap_of_zero_tensors_is_zero_or_nothing_and_never_nan():
    zero, one = [0.0, 0.0], [3.0, 4.0]
    assert _gap(zero, zero) == Gap(rel_error=0.0, cosine=None)
    assert _gap(zero, one) == Gap(rel_error=None, cosine=None)
    assert _gap(one, zero) == Gap(rel_error=1.0, cosine=None)
    assert _gap(one, one) == Gap(rel_error=0.0, cosine=1.0)
    assert _gap(one, [-3.0, -4.0]) == Gap(rel_error=2.0, cosine=-1.0)


def test_a_tenth_of_error_is_twenty_decibels():
    gap = _gap([10.0, 0.0], [10.0, 1.0])
    assert gap.rel_error == pytest.approx(0.1)
    assert gap.sqnr_db == pytest.approx(20)
    assert gap.to_json(prefix="forced_").keys() == {
        "forced_rel_error", "forced_cosine", "forced_sqnr_db"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_sums_over_many_rows_are_those_of_whole_tensors(dtype):
    r, c = torch.randn(2, 700, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = gap_sums(r, c)
    r, c = r.double(), c.double()
    expected = torch.stack([(r * r).sum(), (c * c).sum(), (r * c).sum(), ((c - r) ** 2).sum()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)


def test_what_was_never_measured_has_no_gap():
    assert gap_of([float("nan")] * 4) is None
