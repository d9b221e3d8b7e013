import json
import math

import numpy as np
import pytest
import torch

from k3quant.errors import ExitCode, RefusedError, ValuesError
from k3quant.eval.executor import finish, walk_layers
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings
from k3quant.eval.stream_gap import Gap

SETTINGS = EvalSettings(ctx=24)
ROUTER = "language_model.model.layers.2.block_sparse_moe.gate.weight"
O_PROJ = "language_model.model.layers.3.self_attn.o_proj.weight"


def _noise(weight):
    rng = torch.Generator().manual_seed(0)
    spread = weight.float().std()
    return (weight.float() + 0.2 * spread * torch.randn(weight.shape, generator=rng)).bfloat16()


def test_a_checkpoint_against_itself_is_exactly_the_same(oracle, write_ids, some_ids):
    path = write_ids(some_ids(100).tolist(), some_ids(9, seed=1).tolist())
    result = evaluate(oracle, tokens=path, reference=oracle, settings=SETTINGS)
    found = result.divergence
    assert (found.kld_mean, found.kld_p99) == (0.0, 0.0)
    assert (found.top1_agreement, found.router_agreement) == (1.0, 1.0)
    same = Gap(rel_error=0.0, cosine=1.0)
    assert [entry.layer for entry in found.layers] == list(range(9))
    for entry in found.layers:
        assert entry.stream == entry.attention == entry.mlp == same
        assert entry.forced == entry.forced_attention == entry.forced_mlp == same
        assert entry.stream.sqnr_db is None
    assert found.blamed is None
    assert found.reference_nll_mean == result.nll_mean
    alone = evaluate(oracle, tokens=path, settings=SETTINGS)
    assert np.array_equal(alone.nll, result.nll)


def _whole(model, ids):
    """Return streams, taps and log-probabilities of one window, all in memory."""
    chosen = {}
    kept = ("topk_ids", "attn_out", "mlp_out")
    streams = list(
        walk_layers(
            model, [ids],
            tap=lambda name, value: chosen.update({name: value}) if name.endswith(kept) else 0,
        )
    )  # fmt: skip
    hidden = finish(model, streams[-1])
    logits = hidden @ torch.cat([weight for _, weight in model.head_blocks()]).T
    return [s.prefix.double() for s in streams[1:]], chosen, logits.double().log_softmax(-1)


def _check_gap(gap, reference, candidate):
    error = ((candidate - reference).norm() / reference.norm()).item()
    assert gap.rel_error == pytest.approx(error, rel=1e-6)
    dot = candidate.flatten() @ reference.flatten()
    assert gap.cosine == pytest.approx((dot / candidate.norm() / reference.norm()).item(), rel=1e-9)
    assert gap.sqnr_db == (pytest.approx(-20 * math.log10(error)) if error else None)


def test_a_damaged_checkpoint_differs_by_what_whole_tensors_say(
    oracle, copy_of, edit_tensor, open_model, write_ids, some_ids
):
    folder, ids = copy_of(oracle), some_ids(24)
    edit_tensor(folder, ROUTER, _noise)
    edit_tensor(folder, O_PROJ, _noise)
    found = evaluate(
        folder, tokens=write_ids(ids.tolist()), reference=oracle, settings=SETTINGS
    ).divergence
    theirs, their_taps, logp = _whole(open_model(oracle), ids[:-1])
    ours, our_taps, logq = _whole(open_model(folder), ids[:-1])
    kld = (logp.exp() * (logp - logq)).sum(-1)
    assert found.kld_mean == pytest.approx(kld.mean().item(), rel=1e-3)
    assert found.kld_p99 == pytest.approx(np.quantile(kld.numpy(), 0.99), rel=1e-3)
    same_top1 = (logp.argmax(-1) == logq.argmax(-1)).double().mean().item()
    assert found.top1_agreement == pytest.approx(same_top1)
    same = total = 0
    for name, experts in their_taps.items():
        if "topk_ids" not in name:
            continue
        for a, b in zip(experts.tolist(), our_taps[name].tolist(), strict=True):
            same, total = same + len(set(a) & set(b)), total + len(a)
    assert found.router_agreement == same / total < 1
    for entry, r, c in zip(found.layers, theirs, ours, strict=True):
        _check_gap(entry.stream, r, c)
        for gap, short in ((entry.attention, "attn_out"), (entry.mlp, "mlp_out")):
            name = f"layers.{entry.layer}.{short}"
            _check_gap(gap, their_taps[name].double(), our_taps[name].double())
    # Layers before the damage are untouched to the last bit.
    assert [entry.rel_error == 0 for entry in found.layers] == [True] * 2 + [False] * 7


def test_passes_under_a_memory_budget_are_added_up(
    oracle, copy_of, edit_tensor, write_ids, some_ids, monkeypatch
):
    folder, path = copy_of(oracle), write_ids(some_ids(100).tolist())
    edit_tensor(folder, O_PROJ, _noise)
    whole = evaluate(folder, tokens=path, reference=oracle, settings=SETTINGS).divergence
    one_by_one = lambda windows, config, **_: ([window] for window in windows)  # noqa: E731
    monkeypatch.setattr("k3quant.eval.perplexity.plan_passes", one_by_one)
    split = evaluate(folder, tokens=path, reference=oracle, settings=SETTINGS).divergence
    assert split.kld_mean == pytest.approx(whole.kld_mean, rel=1e-3)
    assert split.top1_agreement == whole.top1_agreement
    for a, b in zip(split.layers, whole.layers, strict=True):
        assert a.rel_error == pytest.approx(b.rel_error, rel=1e-3)


def _change_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= values
    path.write_text(json.dumps(config))


def test_another_tokenizer_is_refused(oracle, copy_of, write_ids):
    folder = copy_of(oracle)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|end_of_msg|>", "<|other_end|>"))
    with pytest.raises(RefusedError, match="reference's tokenizer") as caught:
        evaluate(folder, tokens=write_ids([1, 2, 3]), reference=oracle, settings=SETTINGS)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_ids_that_differ_are_refused(oracle, nano, copy_of, write_ids):
    # The same text through two tokenizers.
    with pytest.raises(RefusedError, match="reference's vocab_size 2304, got 608"):
        evaluate(oracle, text=nano / "config.json", reference=nano, settings=SETTINGS)


def test_a_reference_that_is_not_finite_is_said_to_be_the_reference(
    oracle, copy_of, edit_tensor, write_ids
):
    folder = copy_of(oracle)

    def poison(weight):
        weight[5, 5] = math.nan
        return weight

    edit_tensor(folder, "language_model.lm_head.weight", poison)
    with pytest.raises(ValuesError, match="lm_head of the reference"):
        evaluate(oracle, tokens=write_ids([1, 2, 3]), reference=folder, settings=SETTINGS)
