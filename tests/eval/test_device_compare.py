"""Comparison on a device: the same weights are apart by rounding, others as on the host."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.layer_meter import LayerDivergence, LayerMeter
from k3quant.eval.lockstep import Walker, walk_together
from k3quant.eval.source import Model

GUILTY = 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def damaged(nano: Path, tmp_path: Path) -> Path:
    """Return a copy with the scales of one layer's experts doubled."""
    folder = Path(shutil.copytree(nano, tmp_path / "damaged"))
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        names = [n for n in tensors if f".layers.{GUILTY}." in n and n.endswith("weight_scale")]
        for name in names:
            tensors[name] += 1
        if names:
            save_file(tensors, shard)
    return folder


def on_device(folder: Path, device: torch.device, dtype: torch.dtype) -> DeviceModel:
    return DeviceModel(open_checkpoint(folder), dtype=dtype, device=device, threads=2)


def on_host(folder: Path, dtype: torch.dtype) -> CheckpointModel:
    checkpoint = open_checkpoint(folder)
    return CheckpointModel(checkpoint, dtype=dtype, ahead_bytes=1 << 20, threads=1)


def compare(
    candidate: Model, reference: Model, inputs: list[np.ndarray]
) -> tuple[LayerDivergence, ...]:
    experts = reference.config.moe.num_experts
    meter = LayerMeter(
        num_layers=reference.config.num_hidden_layers,
        reference_experts=experts,
        candidate_experts=experts,
    )
    walkers = {
        "candidate": Walker(model=candidate, copies=2, watched=True),
        "reference": Walker(model=reference, watched=True),
    }
    steps = walk_together(walkers, inputs)
    next(steps)
    for step in steps:
        meter.add(step)
    return meter.layers()


@pytest.fixture
def inputs(some_ids: Callable[..., np.ndarray]) -> list[np.ndarray]:
    return [some_ids(n, seed=n) for n in (130, 37, 130, 5)]


def test_the_same_weights_are_apart_by_rounding(
    nano: Path, device: torch.device, inputs: list[np.ndarray]
) -> None:
    first, second = (on_device(nano, device, torch.float32) for _ in range(2))
    for layer in compare(first, second, inputs):
        gaps = [layer.stream, layer.attention, layer.mlp, layer.forced, layer.forced_attention]
        for gap in [*gaps, layer.forced_mlp]:
            assert gap is not None
            # An expert's rows of both copies are one product, which may round otherwise.
            assert gap.rel_error == pytest.approx(0, abs=1e-6)


def test_a_damaged_layer_shows_as_on_the_host(
    nano: Path, damaged: Path, device: torch.device, inputs: list[np.ndarray]
) -> None:
    dtype = torch.float32
    ours = compare(on_device(damaged, device, dtype), on_device(nano, device, dtype), inputs)
    theirs = compare(on_host(damaged, dtype), on_host(nano, dtype), inputs)
    for layer, host in zip(ours, theirs, strict=True):
        for got, expected in (
            (layer.stream, host.stream), (layer.attention, host.attention), (layer.mlp, host.mlp),
            (layer.forced, host.forced), (layer.forced_attention, host.forced_attention),
            (layer.forced_mlp, host.forced_mlp),
        ):  # fmt: skip
            assert got is not None
            assert expected is not None
            assert got.rel_error == pytest.approx(expected.rel_error, rel=1e-2, abs=1e-5)
    guilty = [
        layer.layer for layer in ours if layer.forced and (layer.forced.rel_error or 0) > 1e-3
    ]
    assert guilty == [GUILTY]
