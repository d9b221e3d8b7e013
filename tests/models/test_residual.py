import pytest
import torch

from k3quant.models import rows
from k3quant.models.residual import Residual, mix_blocks


def test_mix_averages_the_sources_themselves_by_the_score_of_their_norms():
    residual = Residual(torch.tensor([[0.0, 2.0]]), (torch.tensor([[2.0, 0.0]]),))
    out = mix_blocks(residual, torch.ones(2), torch.tensor([[1.0, 0.0]]), eps=0.0)
    torch.testing.assert_close(out, torch.tensor([[1.6088593650, 0.3911406350]]))


def test_mix_without_blocks_is_the_prefix():
    prefix = torch.randn(3, 4)
    assert mix_blocks(Residual(prefix), torch.ones(4), torch.ones(1, 4), eps=1e-5) is prefix


def test_mix_weighs_the_norm_into_the_score_only():
    residual = Residual(torch.tensor([[0.0, 2.0]]), (torch.tensor([[2.0, 0.0]]),))
    by_norm = mix_blocks(residual, torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 0.0]]), eps=0.0)
    by_proj = mix_blocks(residual, torch.ones(2), torch.tensor([[3.0, 0.0]]), eps=0.0)
    torch.testing.assert_close(by_norm, by_proj)


@pytest.mark.parametrize("shape", [(7, 8), (2, 5, 8)], ids=["flat", "windows"])
def test_mix_in_row_blocks_equals_mix_at_once(shape, monkeypatch):
    torch.manual_seed(0)
    residual = Residual(torch.randn(shape), (torch.randn(shape), torch.randn(shape)))
    norm, proj = torch.randn(8), torch.randn(1, 8)
    whole = mix_blocks(residual, norm, proj, eps=1e-5)
    monkeypatch.setattr(rows, "ROW_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(rows, "MIN_ROWS", 3)
    torch.testing.assert_close(mix_blocks(residual, norm, proj, eps=1e-5), whole)
