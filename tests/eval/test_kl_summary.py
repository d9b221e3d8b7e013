import numpy as np
import pytest
import torch

from k3quant.eval.kl_summary import HISTOGRAM_LOG10, percentile, summarize_kl


@pytest.mark.parametrize("count", [1, 2, 100, 101])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_percentile_is_that_of_numpy(count, share):
    values = torch.rand(count, dtype=torch.float64)
    assert percentile(values, share) == pytest.approx(np.quantile(values.numpy(), share))


def _summary(kld, confidence=None):
    kld = torch.tensor(kld, dtype=torch.float64)
    return summarize_kl(kld, torch.full_like(kld, 0.5) if confidence is None else confidence)


def test_each_position_is_in_the_bucket_of_its_confidence():
    edges = torch.tensor([0.0, 0.2, 0.25, 0.5, 0.75, 0.9, 0.98, 0.99, 1.0], dtype=torch.float64)
    found = _summary([float(i) for i in range(9)], edges)
    assert [bucket.count for bucket in found.buckets] == [2, 1, 1, 1, 2, 2]
    assert [bucket.kld_mean for bucket in found.buckets] == [0.5, 2, 3, 4, 5.5, 7.5]
    assert sum(bucket.count for bucket in found.buckets) == 9
    assert (found.buckets[0].low, found.buckets[-1].high) == (0, 1)


def test_an_empty_bucket_has_no_mean():
    assert [bucket.kld_mean for bucket in _summary([1.0]).buckets] == [
        None,
        None,
        1,
        None,
        None,
        None,
    ]


def test_histogram_counts_every_position_once():
    found = _summary([0.0, 1e-13, 1e-12, 2e-12, 0.5, 1.0, 50.0, 1e9])
    assert len(found.histogram) == len(HISTOGRAM_LOG10) - 1
    assert found.below == 2
    assert found.histogram[0] == 2
    place = {edge: i for i, edge in enumerate(HISTOGRAM_LOG10)}
    assert found.histogram[place[-0.5]] == 1
    assert found.histogram[place[0]] == 1
    assert found.histogram[-1] == 2
    assert found.below + sum(found.histogram) == 8


def test_summary_has_the_published_keys_and_numbers():
    found = _summary([0.0, 1.0, 2.0, 3.0, 4.0]).to_json()
    assert (found["kld_mean"], found["kld_median"], found["kld_max"]) == (2, 2, 4)
    assert (found["kld_p90"], found["kld_p99"]) == (pytest.approx(3.6), pytest.approx(3.96))
    assert found["kld_by_confidence"][2] == {"from": 0.5, "to": 0.75, "count": 5, "kld_mean": 2}
    assert sum(found["kld_histogram"]["counts"]) == 4
