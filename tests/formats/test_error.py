import math

import pytest
import torch

from k3quant.formats.error import ErrorSum, WeightError, weight_error


def test_equal_tensors_are_exact():
    weight = torch.tensor([1.0, -0.0, 3.0])
    assert weight_error(weight, torch.tensor([1.0, 0.0, 3.0])) == WeightError(
        count=3,
        max_abs=0.0,
        rel_rms=0.0,
        sqnr_db=None,
        saturated=None,
        flushed=0,
        not_finite=0,
        exact=True,
    )


def test_known_difference():
    got = weight_error(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 3.5, 0.0]))
    assert got.max_abs == 0.5
    assert got.rel_rms == 0.1
    assert got.sqnr_db == pytest.approx(20.0)
    assert not got.exact


@pytest.mark.parametrize(
    ("candidate", "rel_rms"), [([0.0, 0.0], 0.0), ([0.0, 1.0], None)], ids=["zero", "noise"]
)
def test_zero_reference_gives_no_ratio(candidate, rel_rms):
    got = weight_error(torch.zeros(2), torch.tensor(candidate))
    assert got.rel_rms == rel_rms
    assert got.sqnr_db is None


def test_empty_tensors_are_exact():
    got = weight_error(torch.zeros(0, 4), torch.zeros(0, 4))
    assert (got.count, got.exact, got.rel_rms, got.sqnr_db) == (0, True, 0.0, None)


def test_saturation_is_counted_against_the_limit():
    reference, limit = torch.tensor([1.0, -7.0, 6.0]), torch.full((3,), 6.0)
    assert weight_error(reference, reference.clamp(-6, 6), limit=limit).saturated == 1


def test_flushed_elements_are_counted():
    assert weight_error(torch.tensor([1e-9, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])).flushed == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_values_that_are_not_finite_are_counted_apart(side, bad):
    whole, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])
    got = weight_error(broken, whole) if side == "reference" else weight_error(whole, broken)
    assert (got.not_finite, got.max_abs, got.rel_rms, got.exact) == (1, 0.0, 0.0, False)


def test_float32_ends_do_not_overflow():
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    got = weight_error(largest, -largest)
    assert got.rel_rms == pytest.approx(2.0)


def test_pieces_add_up(monkeypatch):
    generator = torch.Generator().manual_seed(8)
    reference = torch.randn(7, 100, generator=generator)
    candidate = reference.bfloat16()
    candidate[0, 0] += 1  # the largest difference lies in the first piece
    whole = weight_error(reference, candidate, limit=torch.ones(7, 100))
    monkeypatch.setattr("k3quant.formats.error._PIECE", 64)
    cut = weight_error(reference, candidate, limit=torch.ones(7, 100))
    parts = ErrorSum()
    for row in range(7):
        parts.add(reference[row], candidate[row], limit=torch.ones(100))
    for other in (cut, parts.result()):
        assert other.rel_rms == pytest.approx(whole.rel_rms, rel=1e-12)
        assert (other.count, other.max_abs, other.saturated) == (
            whole.count,
            whole.max_abs,
            whole.saturated,
        )
    assert whole.saturated == int((reference.abs() > 1).sum()) > 0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shape: expected"):
        weight_error(torch.zeros(2, 3), torch.zeros(3))
