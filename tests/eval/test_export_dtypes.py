"""Exports walk in bfloat16 too: a float32 scale does not make a weight float32."""

from pathlib import Path

import pytest
import torch

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import load_recipe, recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.executor import run_layers
from k3quant.formats.mx import ScaleRounding
from k3quant.models.k3_tensors import layer_tensors


@pytest.fixture(
    scope="module", params=["nvfp4", "fp8-block", "int8", "int4", "mxfp8", "recipe fp8-all"]
)
def export(request, nano, tmp_path_factory) -> Path:
    target, out = request.param, tmp_path_factory.mktemp("export") / "out"
    rules = (
        load_recipe(target.removeprefix("recipe "))
        if target.startswith("recipe ")
        else recipe_for(
            target, scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
        )
    )
    source = open_checkpoint(nano)
    run_convert(source, out, plan_export(source, rules), ConvertSettings(parameters={}))
    return out


def _host(folder, dtype):
    return CheckpointModel(open_checkpoint(folder), dtype=dtype, ahead_bytes=1 << 20, threads=1)


def _bfloat16_error(folder, inputs):
    fine, coarse = (
        run_layers(_host(folder, dtype), inputs).prefix.double()
        for dtype in (torch.float32, torch.bfloat16)
    )
    return (coarse - fine).norm() / fine.norm()


def test_bfloat16_moves_an_export_no_more_than_the_original(export, nano, some_ids):
    inputs = [some_ids(24), some_ids(7, seed=1)]
    assert 0 < _bfloat16_error(export, inputs) < 1.5 * _bfloat16_error(nano, inputs)


def test_a_devices_walk_in_bfloat16_gives_the_hosts_stream(export, some_ids):
    inputs = [some_ids(24), some_ids(7, seed=1)]
    device = DeviceModel(
        open_checkpoint(export), dtype=torch.bfloat16, device=torch.device("cpu"), threads=2
    )
    expected = run_layers(_host(export, torch.bfloat16), inputs).prefix.double()
    found = run_layers(device, inputs).prefix.double()
    assert (found - expected).norm() / expected.norm() < 0.1


def test_only_what_the_release_keeps_in_float32_is_float32(export):
    model = _host(export, torch.bfloat16)
    with model.walk() as weights:
        for layer in range(2):
            table = layer_tensors(model.config, layer, packed=False)
            own = weights.layer(layer)
            exact = {role for role, weight in own.items() if weight.dtype is torch.float32}
            assert exact == {spec.role for spec in table if spec.dtype == "F32"}
            if model.config.is_moe(layer):
                for expert in weights.experts(layer, [0, 5]):
                    assert {w.dtype for w in expert.values()} == {torch.bfloat16}
