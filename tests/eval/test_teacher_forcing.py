import torch

from k3quant.eval.executor import walk_layers
from k3quant.eval.lockstep import Walker, walk_together
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings

SETTINGS = EvalSettings(ctx=24)
GUILTY = 4


def _double_scales(folder, layer, edit_tensor):
    """Double every expert's scale of a layer: one more in each E8M0 exponent."""
    for expert in range(8):
        for part in ("w1", "w2", "w3"):
            name = (
                f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
                ".weight_scale"
            )
            edit_tensor(folder, name, lambda scale: scale + 1)


def test_doubled_scales_of_one_layer_are_blamed_on_that_layer(
    oracle, copy_of, edit_tensor, write_ids, some_ids
):
    folder = copy_of(oracle)
    _double_scales(folder, GUILTY, edit_tensor)
    found = evaluate(
        folder, tokens=write_ids(some_ids(60).tolist()), reference=oracle, settings=SETTINGS
    ).divergence
    assert found.blamed.layer == GUILTY
    assert found.to_json()["worst_layer"] == GUILTY
    # Every other layer, fed with the reference's stream, is the reference to the last bit.
    assert [x.layer for x in found.layers if x.forced.rel_error != 0] == [GUILTY]
    assert [x.layer for x in found.layers if x.forced_mlp.rel_error != 0] == [GUILTY]
    assert all(x.forced_attention.rel_error == 0 for x in found.layers)
    # Running free the damage goes on through all layers behind it.
    assert [x.layer for x in found.layers if x.rel_error > 1e-3] == list(range(GUILTY, 9))


def test_without_teacher_forcing_the_other_numbers_are_the_same(
    oracle, copy_of, edit_tensor, write_ids, some_ids
):
    folder, path = copy_of(oracle), write_ids(some_ids(60).tolist(), some_ids(7).tolist())
    _double_scales(folder, GUILTY, edit_tensor)
    both = [
        evaluate(
            folder, tokens=path, reference=oracle,
            settings=EvalSettings(ctx=24, teacher_forced=forced),
        ).to_json()
        for forced in (True, False)
    ]  # fmt: skip
    for entry in both[0]["layers"]:
        for part in (entry, entry["attention"], entry["mlp"]):
            for name in [name for name in part if name.startswith("forced_")]:
                del part[name]
    del both[0]["worst_layer"]
    for summary in both:
        del summary["seconds"], summary["bytes_read"]
    assert both[0] == both[1]


def test_a_copy_walks_like_its_model_alone(oracle, open_model, some_ids):
    inputs = [some_ids(n, seed=n) for n in (17, 5, 17)]
    alone = list(walk_layers(open_model(oracle), inputs))
    walkers = {"candidate": Walker(model=open_model(oracle), copies=2), "reference": Walker(
        model=open_model(oracle))}  # fmt: skip
    for expected, step in zip(alone, walk_together(walkers, inputs), strict=True):
        prefix = step.residuals["candidate"].prefix
        assert torch.equal(prefix[:39], expected.prefix)
        assert torch.equal(prefix[39:], expected.prefix)
        for block, theirs in zip(step.residuals["candidate"].blocks, expected.blocks, strict=True):
            assert torch.equal(block, torch.cat([theirs, theirs]))
