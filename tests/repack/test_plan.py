import json
import subprocess
import sys

import pytest

from k3quant.checkpoint.writer import ShardWriter
from k3quant.errors import SchemaError, UsageError
from k3quant.repack.plan import plan_repack
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings

EXTRAS = [
    ("extra.empty", "BF16", (0, 64)),
    ("extra.mask", "BOOL", (3,)),
    ("extra.scalar", "F32", ()),
]
DATA = {"extra.empty": b"", "extra.mask": b"\1\0\1", "extra.scalar": b"\0\0\xc0\x3f"}


def _add_extras(folder):
    with ShardWriter(folder / "extra.safetensors", EXTRAS) as writer:
        for name, data in DATA.items():
            writer.write(name, data)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(DATA, "extra.safetensors")
    index["metadata"]["total_size"] += 7
    path.write_text(json.dumps(index))


def test_a_plan_writes_nothing_and_a_run_does_what_it_says(tiny, tmp_path, files):
    before = files(tiny)
    settings = RepackSettings(layout=Layout.RANK, ranks=2)
    plan = plan_repack(tiny, settings)
    planned = plan.report()
    assert list(tmp_path.iterdir()) == [tiny]
    assert files(tiny) == before
    done = run_repack(tiny, tmp_path / "out", settings)
    for key, value in planned.summary.items():
        assert done.summary[key] == value
    sizes = {file: (tmp_path / "out" / file).stat().st_size for file in plan.sizes}
    assert sizes == dict(plan.sizes)
    assert planned.summary["file_bytes"] == sum(sizes.values())


def test_tensors_that_touch_are_one_range(tiny):
    assert plan_repack(tiny, RepackSettings()).num_ranges == 7
    assert plan_repack(tiny, RepackSettings(layout=Layout.ORIGINAL, align=64)).num_ranges == 7


def test_a_layer_is_one_range_of_the_released_layout(tiny):
    plan = plan_repack(tiny, RepackSettings(layout=Layout.LAYER))
    assert plan.num_ranges < 4 + 3 * 3  # the globals of three files are laid out together


def test_unknown_tensors_go_with_the_globals_and_are_told(tiny):
    _add_extras(tiny)
    plan = plan_repack(tiny, RepackSettings(layout=Layout.LAYER))
    held = {shard.file: {item.name for item in shard.items} for shard in plan.shards.files}
    assert DATA.keys() <= held["model-globals.safetensors"]
    (warning,) = plan.warnings
    assert warning.code == "unknown-tensors"
    assert "extra.empty, extra.mask, extra.scalar" in warning.message
    assert plan.report().ok


def test_a_tensor_above_the_limit_is_told(tiny):
    plan = plan_repack(tiny, RepackSettings(max_shard_bytes=1000))
    (warning,) = plan.warnings
    assert warning.code == "oversized-tensors"
    assert all(len(shard.items) == 1 for shard in plan.shards.files if shard.items[0].size > 1000)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param(
            RepackSettings(layout=Layout.RANK, ranks=6), UsageError, "expected 1 to 5, got 6",
            id="too many ranks",
        ),
        pytest.param(
            RepackSettings(layers=(0, 4)), UsageError, "within 0-3, got 0-4", id="cut too long"
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(tiny, settings, error, message):
    with pytest.raises(error, match=message):
        plan_repack(tiny, settings)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "kimi_k3"}])
def test_without_a_table_files_by_size_still_can_be_made(tiny, tmp_path, digests, config):
    before = digests(tiny)
    (tiny / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    run_repack(tiny, out, RepackSettings(max_shard_bytes=30_000))
    assert digests(out) == before
    with pytest.raises(SchemaError):
        plan_repack(tiny, RepackSettings(layout=Layout.ORIGINAL))


def test_the_whole_model_is_planned_in_seconds(tmp_path):
    script = """
import sys, time
from pathlib import Path
from k3quant.manifest import load_config
from k3quant.repack.plan import plan_repack
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.synth.run import synth
folder = Path(sys.argv[1])
synth(load_config("kimi-k3"), folder, sparse=True)
start = time.process_time()
summary = plan_repack(folder, RepackSettings(layout=Layout.RANK, ranks=32)).summary()
seconds = time.process_time() - start
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
real = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
print(summary["tensors"], summary["tensor_bytes"], summary["indexes"], seconds, peak, real)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "k3"], capture_output=True, text=True, check=True
    )
    tensors, tensor_bytes, indexes, seconds, peak, real = run.stdout.split()
    assert (int(tensors), int(tensor_bytes)) == (497_220, 1_560_860_324_864)
    assert int(indexes) == 33
    assert float(seconds) < 20
    assert int(peak) < 2_000_000_000
    assert int(real) < 200_000_000
