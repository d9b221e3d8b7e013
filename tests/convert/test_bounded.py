"""A conversion holds a few matrices, never a shard: proven in a process that may not grow."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3quant.synth.run import synth

SHARD_BYTES = 160 << 20
ROOM = 120 << 20  # less than one shard

CODE = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.formats.mx import ScaleRounding

nano, large, out = (Path(word) for word in sys.argv[1:4])
rules = recipe_for(
    sys.argv[4], scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
)
settings = ConvertSettings(parameters={}, jobs=2)

def convert(source, name):
    checkpoint = open_checkpoint(source)
    run_convert(checkpoint, out / name, plan_export(checkpoint, rules), settings)

convert(nano, "nano")
status = Path("/proc/self/status").read_text()
now = int(status.split("VmData:")[1].split("kB")[0]) * 1024
limit = now + int(sys.argv[5])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert(large, "large")
try:
    np.ones(int(sys.argv[6]), np.uint8)
    print("held")
except MemoryError:
    print("refused")
"""


@pytest.fixture(scope="module")
def large(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = copy.deepcopy(json.loads((nano / "config.json").read_text()))
    config["text_config"] |= {
        "num_experts": 640, "routed_expert_hidden_size": 512, "moe_intermediate_size": 512,
    }  # fmt: skip
    del config["vision_config"]
    folder = tmp_path_factory.mktemp("bounded") / "large"
    synth(config, folder, sparse=False, layers=(1, 2))
    assert max(path.stat().st_size for path in folder.glob("*.safetensors")) > SHARD_BYTES
    return folder


@pytest.mark.parametrize("target", ["nvfp4", "bf16"])
def test_conversion_fits_where_a_shard_does_not(
    large: Path, nano: Path, tmp_path: Path, target: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, nano, large, tmp_path, target, str(ROOM), str(SHARD_BYTES)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    # The limit is one that holding a shard's bytes would break.
    assert done.stdout.split() == ["refused"]
