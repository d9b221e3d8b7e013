import pytest
import torch

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import load_recipe
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.eval.data import evaluate_data
from k3quant.eval.data_divergence import KINDS, Sums
from k3quant.eval.perplexity import evaluate
from k3quant.models import rows


@pytest.mark.parametrize("block", [1 << 22, 1], ids=["whole", "row-blocks"])
def test_each_kind_has_its_own_error_and_angle(monkeypatch, block):
    monkeypatch.setattr(rows, "ROW_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(rows, "MIN_ROWS", 2)
    torch.manual_seed(0)
    reference, noise = torch.randn(7, 5), torch.randn(7, 5)
    kinds = torch.tensor([0, 1, 1, 0, 0, 1, 0])
    candidate = 1.5 * reference + noise * (0.1 + kinds[:, None])
    sums = Sums()
    sums.add(reference[:3], candidate[:3], kinds[:3])
    sums.add(reference[3:], candidate[3:], kinds[3:])
    for kind in range(len(KINDS)):
        r, c = reference[kinds == kind].double(), candidate[kinds == kind].double()
        found = sums.result(kind, 4)
        assert found.layer == 4
        assert found.rel_error == pytest.approx(float((c - r).norm() / r.norm()))
        assert found.cosine == pytest.approx(float((c * r).sum() / (c.norm() * r.norm())))


def test_zeros_have_no_angle_and_only_equal_ones_an_error():
    sums, zeros = Sums(), torch.zeros(2, 3)
    sums.add(zeros, torch.stack((zeros[0], torch.ones(3))), torch.tensor([0, 1]))
    equal, other = sums.result(0, 0), sums.result(1, 0)
    assert (equal.rel_error, equal.cosine) == (0.0, None)
    assert (other.rel_error, other.cosine) == (None, None)


def test_lines_of_text_differ_as_a_text_does(oracle, tmp_path):
    checkpoint, out = open_checkpoint(oracle), tmp_path / "int4"
    plan = plan_export(checkpoint, load_recipe("int4-experts"), allow_skip=())
    run_convert(checkpoint, out, plan, ConvertSettings(parameters={}))
    words = "The attention residual of a block is a sum of what came before"
    text, data = tmp_path / "text.txt", tmp_path / "data.jsonl"
    text.write_text(words)
    data.write_text(f'{{"text": "{words}"}}\n')
    theirs = evaluate(out, text=text, reference=oracle).to_json()
    ours = evaluate_data(out, data, reference=oracle).to_json()
    for key in ("kld_mean", "kld_p99", "top1_agreement", "reference_nll_mean", "nll_mean"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7)
    # A line's last id is read too, which a text's is not.
    assert ours["text"]["tokens"] == theirs["tokens_scored"] + 1
    assert ours["media"]["tokens"] == 0
    assert ours["features"] is None
    for own, other in zip(ours["text"]["layers"], theirs["layers"], strict=True):
        assert own["rel_error"] == pytest.approx(other["rel_error"], rel=0.1)
        assert own["cosine"] == pytest.approx(other["cosine"], abs=1e-2)
    assert ours["text"]["router_agreement"] == pytest.approx(theirs["router_agreement"], abs=0.03)
