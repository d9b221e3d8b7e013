import math

import pytest
import torch

from k3quant.models.norms import gated_rms_norm, l2_norm, rms_norm


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x = torch.tensor([[3.0, 4.0]])
    out = rms_norm(x, torch.tensor([1.0, 2.0]), eps=0.0)
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5))


def test_rms_norm_rounds_to_the_activation_dtype_before_it_weighs():
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    weight = torch.tensor([1.0078125, 1.0078125], dtype=torch.bfloat16)
    rounded = (x.float() / math.sqrt(5)).bfloat16()
    assert torch.equal(rms_norm(x, weight, eps=0.0), rounded * weight)


def test_norms_keep_zeros():
    zeros = torch.zeros(2, 4)
    assert torch.equal(rms_norm(zeros, torch.ones(4), eps=1e-5), zeros)
    assert torch.equal(l2_norm(zeros), zeros)


def test_l2_norm_adds_its_epsilon_to_the_sum():
    tiny = torch.full((1, 4), 1e-3)
    assert l2_norm(tiny)[0, 0].item() == pytest.approx(1e-3 / math.sqrt(4e-6 + 1e-6), rel=1e-6)


def test_gated_rms_norm_multiplies_by_the_sigmoid_of_the_gate():
    out = gated_rms_norm(
        torch.tensor([[3.0, 4.0]]), torch.ones(2), torch.tensor([[0.0, 1.0]]), eps=0.0
    )
    expected = torch.tensor([[3.0 * 0.5, 4.0 / (1 + math.exp(-1))]]) / math.sqrt(12.5)
    torch.testing.assert_close(out, expected)
