"""A conversion killed at any moment continues, and ends in the same bytes as one left alone."""

import random
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.formats.mx import ScaleRounding

class Loud:
    def start(self, label, total, unit): print("start", flush=True)
    def advance(self, amount): print("unit", flush=True)
    def note(self, text): print("note", flush=True)

checkpoint = open_checkpoint(Path(sys.argv[1]))
options = {"scheme": "compressed-tensors", "rounding": ScaleRounding.EVEN, "group_size": 32}
recipe = recipe_for("nvfp4", **options)
plan = plan_export(checkpoint, recipe)
settings = ConvertSettings(parameters={"to": "nvfp4"}, jobs=2)
run_convert(checkpoint, Path(sys.argv[2]), plan, settings, Loud())
print("done", flush=True)
"""
KILLS = 10


def run(source: Path, out: Path, lines: int | None) -> bool:
    """Run the conversion, killed after some lines of progress; return whether it ended alone."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, source, out], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for seen, line in enumerate(process.stdout, start=1):
        if line == "done\n":
            break
        if lines is not None and seen >= lines:
            process.kill()
            break
    process.communicate()
    return process.returncode == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".k3quant")}


def test_killed_conversion_ends_in_the_same_bytes(nano: Path, tmp_path: Path) -> None:
    assert run(nano, tmp_path / "whole", None)
    choose = random.Random(7)
    killed = 0
    for _ in range(KILLS):
        if run(nano, tmp_path / "cut", choose.randint(1, 120)):
            break
        killed += 1
        names = {path.name for path in (tmp_path / "cut").iterdir()}
        # The index comes last: nothing that lacks it can be taken for a checkpoint.
        assert "model.safetensors.index.json" not in names
    assert killed >= 3
    assert run(nano, tmp_path / "cut", None)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
