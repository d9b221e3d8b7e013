"""Load an MLX export with mlx-lm, strictly, and score the golden ids on the CPU.

    python mlx_score.py EXPORT_FOLDER golden_ppl.safetensors

Needs the packages `mlx[cpu]` and `mlx-lm`, 0.32.2 or later.
"""

import argparse
import time
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from golden import add_options, compare, losses, read_golden, report, windows
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import get_total_parameters, load_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, tolerance=0.001)
    parser.add_argument("--as-stored", action="store_true", help="do not widen bf16 to float32")
    args = parser.parse_args()

    mx.set_default_device(mx.cpu)
    ids, golden = read_golden(args.golden)
    start = time.perf_counter()
    model, config = load_model(args.folder, strict=True)
    # What the loader built must be what the files hold, so that nothing was renamed on the way.
    stored = {
        name
        for file in sorted(args.folder.glob("model*.safetensors"))
        for name in mx.load(str(file))
    }
    built = {name for name, _ in tree_flatten(model.parameters())}
    if stored != built:
        raise SystemExit(f"names: expected the loader's own, got {sorted(stored ^ built)[:5]}")
    if not args.as_stored:
        model.update(tree_map(widen, model.parameters()))
    loaded = time.perf_counter()
    nll = np.concatenate([losses(run(model, i), t) for i, t in windows(ids)])
    record = {
        "consumer": "mlx-lm",
        "version": f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}",
        "files": len(list(args.folder.glob("model*.safetensors"))),
        "tensors": len(stored),
        "parameters_by_mlx": int(get_total_parameters(model)),
        "quantization": config.get("quantization"),
        "widened": not args.as_stored,
        **compare(nll, golden),
        "load_seconds": round(loaded - start, 2),
        "score_seconds": round(time.perf_counter() - loaded, 2),
    }
    return report(
        record,
        tolerance=args.tolerance,
        expected=args.expected,
        results=args.results,
        name=args.name,
    )


def widen(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array


def run(model: object, inputs: np.ndarray) -> np.ndarray:
    logits = model(mx.array(inputs)[None])[0].astype(mx.float32)
    return np.array(logits)


if __name__ == "__main__":
    raise SystemExit(main())
