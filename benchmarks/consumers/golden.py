"""Golden ids and losses, read without any package but numpy, and how a score compares with them.

Windows of 512 inputs, the context restarts at each window, the first id is never scored, no BOS.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 512

_NUMPY = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "F64": np.float64}


def read_golden(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return `input_ids` `[n]` and `nll` `[n - 1]` in nats of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])

    def tensor(name: str) -> np.ndarray:
        entry = header[name]
        begin, end = entry["data_offsets"]
        return np.frombuffer(data[start + begin : start + end], _NUMPY[entry["dtype"]])

    return tensor("input_ids").astype(np.int64), tensor("nll").astype(np.float64)


def windows(ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return inputs and targets of each window."""
    inputs, targets = ids[:-1], ids[1:]
    begins = range(0, len(inputs), CONTEXT)
    return [(inputs[b : b + CONTEXT], targets[b : b + CONTEXT]) for b in begins]


def losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the loss of each target in nats, in float64.

    Args:
        logits: `[tokens, vocabulary]`.
        targets: `[tokens]`.
    """
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(wide - peak).sum(axis=-1)) + peak[:, 0]
    return log_sum - wide[np.arange(len(targets)), targets]


def compare(nll: np.ndarray, golden: np.ndarray) -> dict[str, Any]:
    """Return both perplexities and how far single tokens are apart."""
    if nll.shape != golden.shape:
        raise ValueError(f"losses: expected {golden.shape}, got {nll.shape}")
    apart = np.abs(nll - golden)
    perplexity, expected = math.exp(nll.mean()), math.exp(golden.mean())
    return {
        "tokens": len(nll),
        "perplexity": perplexity,
        "golden_perplexity": expected,
        "difference": perplexity - expected,
        "token_nll_mean_abs": float(apart.mean()),
        "token_nll_max_abs": float(apart.max()),
    }


def report(
    record: dict[str, Any],
    *,
    tolerance: float,
    expected: float | None,
    results: Path | None,
    name: str,
) -> int:
    """Print the record, keep it, and return the exit code: 1 where it is not as expected.

    Args:
        record: What was measured.
        tolerance: Largest difference of the perplexity.
        expected: Its right value; None takes the golden one.
        results: JSON file that keeps the record under `name`; None keeps nothing.
        name: What was scored.
    """
    target = record["golden_perplexity"] if expected is None else expected
    good = abs(record["perplexity"] - target) <= tolerance
    good = good and record.get("tokenizer_equal", True)
    record = record | {"expected": target, "tolerance": tolerance, "good": good}
    print(json.dumps(record, indent=1))
    if results is not None:
        known = json.loads(results.read_text()) if results.exists() else {}
        kept = dict(sorted((known | {name: record}).items()))
        results.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if good else 1


def add_options(parser: argparse.ArgumentParser, *, tolerance: float) -> None:
    """Add what both scripts take."""
    parser.add_argument("folder", type=Path, help="folder of the export")
    parser.add_argument("golden", type=Path, help="safetensors with `input_ids` and `nll`")
    parser.add_argument("--expected", type=float, help="perplexity; the golden one if left out")
    parser.add_argument("--tolerance", type=float, default=tolerance)
    parser.add_argument("--results", type=Path, help="JSON file that keeps the record")
    parser.add_argument("--name", default="", help="what was scored, for the results")
