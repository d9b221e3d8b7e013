"""Evaluation holds a layer, never the model: proven in a process that may not grow."""

import copy
import json
import subprocess
import sys
from pathlib import Path

from k3quant.synth.run import synth

MODEL_BYTES = 300 << 20
ROOM = 220 << 20  # less than the model, let alone its decoded weights

CODE = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings

nano, large, ids = (Path(word) for word in sys.argv[1:4])
settings = EvalSettings(ctx=16, ahead_bytes=32 << 20, read_threads=1)
evaluate(nano, tokens=ids, settings=settings)
status = Path("/proc/self/status").read_text()
now = int(status.split("VmData:")[1].split("kB")[0]) * 1024
limit = now + int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
result = evaluate(large, tokens=ids, settings=settings)
print(result.tokens_scored)
try:
    np.ones(int(sys.argv[5]), np.uint8)
    print("held")
except MemoryError:
    print("refused")
"""


def test_evaluation_fits_where_the_model_does_not(nano: Path, tmp_path: Path) -> None:
    import numpy as np

    config = copy.deepcopy(json.loads((nano / "config.json").read_text()))
    config["text_config"] |= {
        "num_experts": 128, "routed_expert_hidden_size": 512, "moe_intermediate_size": 512,
    }  # fmt: skip
    del config["vision_config"]
    synth(config, tmp_path / "large", sparse=False)
    shards = list((tmp_path / "large").glob("*.safetensors"))
    assert sum(path.stat().st_size for path in shards) > MODEL_BYTES
    np.save(tmp_path / "ids.npy", np.arange(24))
    done = subprocess.run(
        [sys.executable, "-c", CODE, nano, tmp_path / "large", tmp_path / "ids.npy",
         str(ROOM), str(MODEL_BYTES)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    # The limit is one that holding the model's bytes would break.
    assert done.stdout.split() == ["23", "refused"]
