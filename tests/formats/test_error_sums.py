import torch

from k3quant.formats.error import ErrorSum, weight_error
from k3quant.formats.error_sums import ErrorSums

REFERENCE = torch.tensor([1.0, -2.0, 0.0, 4.0])
CANDIDATE = torch.tensor([1.5, -2.0, -0.0, 0.0])
COUNTED = ErrorSums(count=4, equal=2, max_abs=4.0, noise=16.25, signal=21.0, flushed=1)


def test_counted_sums_give_the_record_of_their_elements():
    total = ErrorSum()
    total.add_sums(COUNTED)
    assert total.result() == weight_error(REFERENCE, CANDIDATE)


def test_counted_and_compared_pieces_add():
    total = ErrorSum()
    total.add_sums(COUNTED)
    total.add(REFERENCE, CANDIDATE)
    both = weight_error(torch.cat([REFERENCE] * 2), torch.cat([CANDIDATE] * 2))
    assert total.result() == both


def test_sums_add_but_for_the_largest():
    other = ErrorSums(count=1, max_abs=5.0, noise=25.0, signal=1.0)
    assert COUNTED + other == ErrorSums(
        count=5, equal=2, max_abs=5.0, noise=41.25, signal=22.0, flushed=1
    )
    assert COUNTED + ErrorSums() == COUNTED
