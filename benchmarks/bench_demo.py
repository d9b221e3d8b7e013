"""The table of `k3quant demo`: size, exactness, perplexity and KL of every export of the nano.

    python benchmarks/bench_demo.py

Results go to benchmarks/results/demo.json; the README prints the same rows.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import environment, save


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            [sys.executable, "-m", "k3quant.cli", "demo", "--out", Path(work) / "demo", "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    rows = json.loads(done.stdout)["summary"]["rows"]
    save("demo", {"environment": environment("torch", "numba"), "rows": rows})


if __name__ == "__main__":
    main()
