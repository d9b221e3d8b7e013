"""Quality of each export of the bundled checkpoint: size, perplexity, KL, noise floor, blame.

    python benchmarks/bench_quality.py WORK [--bytes N]

WORK: an empty folder for the exports. Every export is compared with the original on the bundled
text, or on its first N bytes, in float32 and in bfloat16; `noise_floor` is the original against
itself with its sums in another order. `broken` is a copy with the scales of one layer's experts
doubled: `worst_layer` has to name that layer.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from record import environment, save
from safetensors.torch import load_file, save_file

from k3quant.demo import TARGETS, run_demo
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings

BROKEN_LAYER = 5
KEYS = (
    "checkpoint_bytes", "tokens_scored", "ppl", "kld_mean", "kld_median", "kld_p90", "kld_p99",
    "kld_max", "kld_by_confidence", "top1_agreement", "router_agreement", "worst_layer",
)  # fmt: skip
LAYER_KEYS = ("layer", "rel_error", "forced_rel_error", "router_agreement")


def break_layer(original: Path, folder: Path) -> Path:
    """Copy a checkpoint and double the scales of one layer's experts."""
    shutil.copytree(original, folder)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        layer = f".layers.{BROKEN_LAYER}."
        names = [name for name in tensors if layer in name and name.endswith("weight_scale")]
        for name in names:
            tensors[name] += 1  # one more in an E8M0 exponent
        if names:
            save_file(tensors, shard)
    return folder


def measure(folder: Path, original: Path, text: Path, dtype: Any) -> dict[str, Any]:
    settings = EvalSettings(dtype=dtype, noise_floor=True)
    found = evaluate(folder, text=text, reference=original, settings=settings).to_json()
    floor = {key: value for key, value in found["noise_floor"].items() if key != "layers"}
    layers = [{key: entry.get(key) for key in LAYER_KEYS} for entry in found["layers"]]
    return {key: found[key] for key in KEYS} | {"noise_floor": floor, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--bytes", type=int)
    args = parser.parse_args()
    work = args.work
    original, text = work / "kimi-k3-nano", work / "eval.txt"
    exact = {}
    for row in run_demo(work):
        exact[row.name] = row.exact
        print(row.name, flush=True)
    if args.bytes is not None:
        text.write_bytes(text.read_bytes()[: args.bytes])
    folders = {name: work / f"kimi-k3-nano-{name}" for name in TARGETS}
    folders[f"broken, layer {BROKEN_LAYER}"] = break_layer(original, work / "broken")
    rows = []
    for name, folder in {"original": original, **folders}.items():
        for dtype in args.dtypes:
            found = measure(folder, original, text, dtype)
            rows.append({"name": name, "exact": exact.get(name), "dtype": dtype} | found)
            print(name, dtype, found["ppl"], found["kld_mean"], found["worst_layer"], flush=True)
    save("quality-nano", {"environment": environment("torch"), "rows": rows})


if __name__ == "__main__":
    main()
