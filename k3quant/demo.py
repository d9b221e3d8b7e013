"""The bundled small checkpoint, taken through the whole tool: verify, convert, evaluate."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.errors import RefusedError, ValuesError
from k3quant.eval.perplexity import evaluate
from k3quant.eval.result import EvalResult
from k3quant.eval.settings import EvalSettings
from k3quant.formats.mx import ScaleRounding
from k3quant.progress import SILENT, Progress
from k3quant.verify.run import VerifySettings, verify

TARGETS = ("bf16", "mxfp8", "nvfp4", "fp8-block", "int8", "int4")
TEXT_FILE = "eval.txt"
QUICK = EvalSettings(teacher_forced=False)  # which layer is to blame is not in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One checkpoint of the demo: what it is, how large, how exact, how good."""

    name: str
    expert_bytes: int
    exact: str
    result: EvalResult

    def to_json(self) -> dict[str, Any]:
        """Return the row ready for JSON."""
        found = self.result.to_json()
        keys = ("tokens_scored", "nll_mean", "ppl", "kld_mean", "kld_p99", "top1_agreement")
        numbers = {key: found[key] for key in keys if key in found}
        size = {"name": self.name, "expert_bytes": self.expert_bytes, "exact": self.exact}
        return size | numbers


def run_demo(
    out: Path, targets: tuple[str, ...] = TARGETS, progress: Progress = SILENT
) -> Iterator[DemoRow]:
    """Write the bundled checkpoint, verify it, evaluate it, and do so for each conversion.

    Args:
        out: Folder to write into; it must not exist or be empty.
        targets: Formats to convert the routed experts to.
        progress: Told about each stage.

    Yields:
        The original, then each conversion against it.

    Raises:
        RefusedError: The folder holds something.
        ValuesError: A checkpoint does not verify.
    """
    if out.exists() and any(out.iterdir()):
        raise RefusedError(
            f"{out}: expected an empty folder for the demo, got a full one",
            hint="remove it, or name another with --out",
        )
    original = out / "kimi-k3-nano"
    with resources.as_file(resources.files("k3quant").joinpath("nano")) as bundled:
        shutil.copytree(bundled, original, ignore=shutil.ignore_patterns("__pycache__"))
    text = out / TEXT_FILE
    (original / TEXT_FILE).rename(text)
    _prove(original)
    yield DemoRow(
        name="mxfp4 (as trained)",
        expert_bytes=_expert_bytes(original),
        exact="original",
        result=evaluate(original, text=text, progress=progress),
    )
    for target in targets:
        folder = out / f"kimi-k3-nano-{target}"
        checkpoint = open_checkpoint(original)
        recipe = recipe_for(
            target, scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
        )
        plan = plan_export(checkpoint, recipe)
        made = run_convert(
            checkpoint, folder, plan, ConvertSettings(parameters={"to": target}), progress
        )
        _prove(folder)
        total = made.summary["total"]
        yield DemoRow(
            name=target,
            expert_bytes=_expert_bytes(folder),
            exact="yes" if made.exact else f"{total['exact']:,} of {total['weights']:,}",
            result=evaluate(
                folder, text=text, reference=original, settings=QUICK, progress=progress
            ),
        )


def _prove(folder: Path) -> None:
    report = verify(LocalFolder(folder), VerifySettings())
    if not report.ok:
        first = next(f for f in report.findings if f.severity == "error")
        raise ValuesError(f"{folder.name}: expected a healthy checkpoint, got {first.message}")


def _expert_bytes(folder: Path) -> int:
    entries = open_checkpoint(folder).entries
    return sum(entry.length for name, entry in entries.items() if ".experts." in name)
