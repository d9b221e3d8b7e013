from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import ExitCode, RefusedError, SchemaError, ValuesError
from k3quant.eval import media_features as module
from k3quant.eval.data_lines import expand_media
from k3quant.eval.data_side import splice
from k3quant.eval.executor import finish, walk_layers
from k3quant.eval.media_features import media_features
from k3quant.eval.media_weights import VisionWeights
from k3quant.models.k3_config import read_config
from k3quant.models.vision_grid import Grid

NAMES = ("image_4x6", "image_8x8_native", "video_3x4x4")
ATOL = 2e-5  # as of tests/models/test_vision.py
CPU = torch.device("cpu")


class Segment(NamedTuple):
    """Patches that are already decoded."""

    grid: Grid
    values: np.ndarray

    def pixels(self):
        return self.values


@pytest.fixture(scope="module")
def goldens(data):
    return load_file(data / "oracle" / "golden" / "vision.safetensors")


@pytest.fixture(scope="module")
def segment_of(goldens):
    def segment(name):
        grid = Grid(*goldens[f"{name}.grid_thw"].tolist())
        return Segment(grid, goldens[f"{name}.pixel_values"].numpy())

    return segment


@pytest.fixture(scope="session")
def open_vision():
    def opened(folder, dtype=torch.float32):
        checkpoint = open_checkpoint(folder)
        return VisionWeights(checkpoint, read_config(checkpoint.config), dtype=dtype, device=CPU)

    return opened


@pytest.mark.parametrize("name", NAMES)
def test_streamed_intermediates_equal_the_goldens(oracle, open_vision, goldens, segment_of, name):
    seen = {}
    (features,) = media_features(
        open_vision(oracle), [segment_of(name)], tap=lambda key, value: seen.setdefault(key, value)
    )
    torch.testing.assert_close(features, goldens[f"{name}.projector_out"], rtol=0, atol=ATOL)
    assert len(seen) == 6
    for key, value in seen.items():
        torch.testing.assert_close(value, goldens[f"{name}.{key}"], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("patches", "walks"),
    [pytest.param(1, 3, id="each-alone"), pytest.param(100, 2, id="two-then-one"),
     pytest.param(1 << 17, 1, id="together")],
)  # fmt: skip
def test_groups_read_the_tower_once_each(
    oracle, open_vision, goldens, segment_of, monkeypatch, patches, walks
):
    monkeypatch.setattr(module, "GROUP_PATCHES", patches)
    weights = open_vision(oracle)
    tower = sum(
        entry.length
        for name, entry in open_checkpoint(oracle).entries.items()
        if name.startswith(("vision_tower.", "mm_projector."))
    )
    features = list(media_features(weights, [segment_of(name) for name in NAMES]))
    for name, own in zip(NAMES, features, strict=True):
        torch.testing.assert_close(own, goldens[f"{name}.projector_out"], rtol=0, atol=ATOL)
    assert weights.bytes_read == walks * tower


def test_pixels_are_not_decoded_for_a_grid_that_does_not_fit(oracle, open_vision):
    class Long(Segment):
        def pixels(self):
            raise AssertionError("decoded")

    with pytest.raises(SchemaError, match="expected 1 to 4 frames in a chunk, got 5"):
        next(media_features(open_vision(oracle), [Long(Grid(5, 2, 2), None)]))


def test_a_tap_of_several_segments_is_an_error(oracle, open_vision, segment_of):
    both = [segment_of(name) for name in NAMES[:2]]
    with pytest.raises(ValueError, match="expected one segment, got 2"):
        next(media_features(open_vision(oracle), both, tap=lambda *_: None))


def test_media_in_the_prompt_give_the_golden_logits(
    oracle, data, open_model, open_vision, segment_of
):
    golden = load_file(data / "oracle" / "golden" / "multimodal.safetensors")
    model = open_model(oracle)
    media_id = model.config.media_placeholder_token_id
    names = {tuple(segment_of(name).grid): name for name in NAMES}
    segments = [segment_of(names[tuple(grid)]) for grid in golden["grid_thws"].tolist()]
    features = torch.cat(list(media_features(open_vision(oracle), segments)))
    counts = [grid.h * grid.w // 4 for grid, _ in segments]
    prompt = np.concatenate((golden["input_ids"].numpy(), golden["next_id"].numpy()))
    ids = expand_media(prompt, counts, media_id=media_id)
    tensor = torch.from_numpy(ids)
    stream = splice(model.embed(tensor), tensor == media_id, features)
    hidden = finish(model, deque(walk_layers(model, [ids], embedding=stream), maxlen=1)[0])
    logits = hidden @ torch.cat([weight for _, weight in model.head_blocks()]).T
    torch.testing.assert_close(logits[:-1], golden["logits"], rtol=0, atol=5e-4)
    torch.testing.assert_close(logits[-1:], golden["next_logits"], rtol=0, atol=5e-4)
    torch.testing.assert_close(hidden[:-1], golden["final_hidden"], rtol=0, atol=1e-4)


def test_features_of_another_number_than_marks_are_an_error():
    with pytest.raises(ValueError, match="expected 1, got 2"):
        splice(torch.zeros(3, 4), torch.tensor([False, True, False]), torch.zeros(2, 4))
    with pytest.raises(SchemaError, match="media: expected 2 for as many marks, got 1"):
        expand_media(np.array([9, 1, 9]), [4], media_id=9)


def test_bfloat16_stays_close(oracle, open_vision, goldens, segment_of):
    (features,) = media_features(open_vision(oracle, torch.bfloat16), [segment_of(NAMES[0])])
    golden = goldens[f"{NAMES[0]}.projector_out"]
    assert features.dtype is torch.bfloat16
    # Activations of 8 bits through two blocks.
    assert 0 < (features.float() - golden).norm() < 0.05 * golden.norm()


def _poison(weight):
    weight.view(-1)[3] = float("inf")
    return weight


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("vision_tower.patch_embed.proj.weight", "the patch embedding"),
        ("vision_tower.encoder.blocks.1.mlp.fc1.weight", "vision block 1"),
        ("mm_projector.post_norm.weight", "the projector"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(
    oracle, copy_of, edit_tensor, open_vision, segment_of, name, where
):
    folder = copy_of(oracle)
    edit_tensor(folder, name, _poison)
    with pytest.raises(ValuesError, match=rf"^{where}: .*tensor {name} holds 1 such") as caught:
        list(media_features(open_vision(folder), [segment_of(NAMES[0])]))
    assert caught.value.exit_code is ExitCode.VALUES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda w: w.half(), "expected dtype BF16, got F16", id="dtype"),
        pytest.param(lambda w: w.T, r"expected shape \[48, 96\], got \[96, 48\]", id="shape"),
    ],
)
def test_a_tower_of_another_shape_or_dtype_is_refused(
    oracle, copy_of, edit_tensor, open_vision, change, said
):
    folder = copy_of(oracle)
    name = "vision_tower.encoder.blocks.0.wo.weight"
    edit_tensor(folder, name, change)
    with pytest.raises(SchemaError, match=f"{name}: {said}") as caught:
        open_vision(folder)
    assert caught.value.exit_code is ExitCode.SCHEMA


def test_a_text_model_has_no_tower(oracle):
    checkpoint = open_checkpoint(oracle)
    document = {key: value for key, value in checkpoint.config.items() if key != "vision_config"}
    with pytest.raises(RefusedError, match="expected a vision tower"):
        VisionWeights(checkpoint, read_config(document), dtype=torch.float32, device=CPU)
