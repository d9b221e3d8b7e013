"""The device's walk gives the host's numbers: on the processor bit for bit, on a GPU closely."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import load_recipe, recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.errors import IncompleteError, ResourceError, ValuesError
from k3quant.eval import device_moe
from k3quant.eval.checkpoint_model import CheckpointModel
from k3quant.eval.device_model import DeviceModel
from k3quant.eval.executor import finish, run_layers
from k3quant.eval.perplexity import EvalSettings, evaluate
from k3quant.formats.mx import ScaleRounding
from k3quant.models.residual import Residual
from k3quant.stream import budget

GIB = 1 << 30
BFLOAT16_RATIO = 0.1  # of the logits, whose router margins are random here


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu"),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def opened(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, **limits: Any
) -> DeviceModel:
    limits.setdefault("threads", 3)
    return DeviceModel(open_checkpoint(folder), dtype=dtype, device=device, **limits)


def ratio(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the length of the difference over that of what is expected."""
    apart = got.double().cpu() - expected.double().cpu()
    return float(apart.norm() / expected.double().norm())


def streams_agree(ours: Residual, theirs: Residual, device: torch.device) -> bool:
    if device.type == "cpu":
        return torch.equal(ours.prefix, theirs.prefix)
    return ratio(ours.prefix, theirs.prefix) < 1e-4


@pytest.fixture
def inputs(some_ids: Callable[..., np.ndarray]) -> list[np.ndarray]:
    return [some_ids(n, seed=n) for n in (70, 33, 7, 200)]


@pytest.mark.parametrize("name", ["s37", "s64", "s130"])
def test_float32_gives_the_golden_logits(
    oracle: Path, golden: dict[str, torch.Tensor], device: torch.device, name: str
) -> None:
    model = opened(oracle, device)
    ids = golden[f"{name}.input_ids"].numpy()
    hidden = finish(model, run_layers(model, [ids]))
    logits = hidden @ torch.cat([weight for _, weight in model.head_blocks()]).T
    torch.testing.assert_close(logits.cpu(), golden[f"{name}.logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["s64", "s130"])
def test_bfloat16_stays_near_the_golden_logits(
    oracle: Path, golden: dict[str, torch.Tensor], device: torch.device, name: str
) -> None:
    model = opened(oracle, device, torch.bfloat16)
    ids = golden[f"{name}.input_ids"].numpy()
    hidden = finish(model, run_layers(model, [ids]))[:-1]
    logits = hidden.float() @ torch.cat([weight for _, weight in model.head_blocks()]).T
    assert ratio(logits, golden[f"{name}.logits"][:-1]) < BFLOAT16_RATIO


def test_any_budget_and_chunk_gives_the_same_numbers(
    nano: Path,
    device: torch.device,
    inputs: list[np.ndarray],
    open_model: Callable[[Path], CheckpointModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_layers(open_model(nano), inputs)
    roomy = opened(nano, device, vram_bytes=16 * GIB)
    assert streams_agree(run_layers(roomy, inputs), expected, device)
    assert roomy.budget is not None
    assert roomy.budget.stream_on_device
    # Chunks of three experts, a few slots at a time, the stream on the host.
    monkeypatch.setattr(budget, "SMALL_CHUNK_BYTES", 12_000)
    monkeypatch.setattr(device_moe, "MAX_ROWS", 50)
    tight = opened(nano, device, vram_bytes=tight_bytes(nano, device, inputs))
    assert streams_agree(run_layers(tight, inputs), expected, device)
    assert tight.budget is not None
    assert not tight.budget.stream_on_device
    assert tight.budget.chunk_experts < roomy.budget.chunk_experts


def tight_bytes(folder: Path, device: torch.device, inputs: list[np.ndarray]) -> int:
    """Return a budget that holds the least plan and half the stream."""
    model = opened(folder, device, vram_bytes=16 * GIB)
    model.embed(torch.from_numpy(np.concatenate(inputs)))
    assert model.budget is not None
    stream = sum(map(len, inputs)) * 2 * model.config.hidden_size * 4
    arenas = model.budget.expert_arenas * model.budget.chunk_experts * model.expert_bytes
    return model.budget.device_bytes - arenas - stream // 2


def test_few_tokens_read_only_the_experts_they_chose(
    nano: Path,
    device: torch.device,
    some_ids: Callable[..., np.ndarray],
    open_model: Callable[[Path], CheckpointModel],
) -> None:
    host, model = open_model(nano), opened(nano, device)
    few = [some_ids(2, seed=1)]
    assert streams_agree(run_layers(model, few), run_layers(host, few), device)
    everything = opened(nano, device)
    run_layers(everything, [some_ids(300, seed=2)])
    assert model.bytes_read < 0.8 * everything.bytes_read


@pytest.mark.parametrize("target", ["nvfp4", "int4", "fp8-block"])
def test_exports_are_walked_like_on_the_host(
    nano: Path,
    tmp_path: Path,
    device: torch.device,
    inputs: list[np.ndarray],
    open_model: Callable[[Path], CheckpointModel],
    target: str,
) -> None:
    rules = recipe_for(
        target, scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
    )
    source = open_checkpoint(nano)
    settings = ConvertSettings(parameters={})
    run_convert(source, tmp_path / "out", plan_export(source, rules), settings)
    model = opened(tmp_path / "out", device)
    expected = run_layers(open_model(tmp_path / "out"), inputs)
    assert streams_agree(run_layers(model, inputs), expected, device)


def test_quantized_attention_is_decoded_on_the_device(
    nano: Path,
    tmp_path: Path,
    device: torch.device,
    inputs: list[np.ndarray],
    open_model: Callable[[Path], CheckpointModel],
) -> None:
    source, rules = open_checkpoint(nano), load_recipe("fp8-all")
    settings = ConvertSettings(parameters={})
    run_convert(source, tmp_path / "out", plan_export(source, rules), settings)
    model = opened(tmp_path / "out", device)
    expected = run_layers(open_model(tmp_path / "out"), inputs)
    assert streams_agree(run_layers(model, inputs), expected, device)


def test_a_walk_may_begin_later(nano: Path, device: torch.device, inputs: list[np.ndarray]) -> None:
    model = opened(nano, device)
    model.embed(torch.from_numpy(np.concatenate(inputs)))
    with model.walk(first=3) as walk:
        assert walk.weights.layer(3).keys() >= {"mla.o_proj", "moe.gate"}


def test_too_small_a_budget_says_how_much_is_needed(nano: Path, device: torch.device) -> None:
    model = opened(nano, device, vram_bytes=1 << 20)
    with pytest.raises(ResourceError, match=r"vram: expected at least .*, got 1\.05 MB"):
        model.embed(torch.tensor([1, 2]))
    model = opened(nano, device, ram_bytes=1 << 20)
    with pytest.raises(ResourceError, match="ram: expected at least"):
        model.embed(torch.tensor([1, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_nan_scale_of_an_expert_stops_the_walk_and_names_it(
    nano: Path,
    device: torch.device,
    inputs: list[np.ndarray],
    copy_of: Callable[[Path], Path],
    edit_tensor: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    folder = copy_of(nano)
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale"
    edit_tensor(folder, name, lambda scale: scale.index_fill(0, torch.tensor([1]), 255))
    with pytest.raises(ValuesError, match=r"layer 2, expert 5: .*NaN"):
        run_layers(opened(folder, device, dtype), inputs)


def test_a_shard_that_ends_too_early_stops_the_walk(
    nano: Path, tmp_path: Path, device: torch.device, inputs: list[np.ndarray]
) -> None:
    folder = Path(shutil.copytree(nano, tmp_path / "short"))
    model = opened(folder, device)
    shard = folder / "model-00005-of-000012.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 5000)
    with pytest.raises(IncompleteError, match="model-00005"):
        run_layers(model, inputs)


@pytest.mark.gpu
def test_evaluation_and_comparison_on_the_gpu(nano: Path, tmp_path: Path) -> None:
    source = open_checkpoint(nano)
    rules = recipe_for(
        "int4", scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
    )
    run_convert(
        source, tmp_path / "out", plan_export(source, rules), ConvertSettings(parameters={})
    )
    text = tmp_path / "text"
    text.write_text((nano / "eval.txt").read_text()[:9000])
    found = {
        device: evaluate(
            tmp_path / "out", text=text, reference=nano, settings=EvalSettings(device=device)
        )
        for device in ("cpu", "cuda")
    }
    host, there = found["cpu"], found["cuda"]
    assert there.ppl == pytest.approx(host.ppl, rel=1e-3)
    assert host.divergence is not None
    assert there.divergence is not None
    assert there.divergence.kld_mean == pytest.approx(host.divergence.kld_mean, rel=1e-2)
    quick = evaluate(nano, text=text, settings=EvalSettings(device="cuda", dtype="bfloat16"))
    exact = evaluate(nano, text=text, settings=EvalSettings())
    assert quick.nll_mean == pytest.approx(exact.nll_mean, abs=0.01)
