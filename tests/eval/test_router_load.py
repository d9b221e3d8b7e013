import pytest
import torch

from k3quant.eval.router_load import compare_routers, router_sums


def _compare(reference, candidate, experts=(4, 4)):
    sizes = {"reference_experts": experts[0], "candidate_experts": experts[1]}
    sums = router_sums(torch.tensor(reference), torch.tensor(candidate), **sizes)
    return compare_routers(sums.tolist(), **sizes)


def test_agreement_counts_common_experts_in_any_order():
    found = _compare([[0, 1], [2, 3]], [[1, 0], [3, 0]])
    assert (found.same, found.chosen, found.agreement) == (3, 4, 3 / 4)


def test_load_is_that_of_the_busiest_expert_over_the_average():
    found = _compare([[0, 1], [0, 2], [0, 3]], [[0, 1], [0, 1], [0, 1]])
    assert found.reference.max_over_mean == pytest.approx(3 / 1.5)
    assert found.reference.never_chosen == 0
    assert found.candidate.max_over_mean == pytest.approx(3 / 1.5)
    assert found.candidate.never_chosen == 2


def test_another_number_of_experts_has_loads_but_no_agreement():
    found = _compare([[0, 1]], [[0, 1]], experts=(4, 2))
    assert found.agreement is None
    assert (found.reference.never_chosen, found.candidate.never_chosen) == (2, 0)


def test_nothing_routed_is_nothing_to_compare():
    assert compare_routers([0.0] * 10, reference_experts=4, candidate_experts=4) is None
