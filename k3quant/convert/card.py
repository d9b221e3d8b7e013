"""A short model card for an export: what it is, what it cost, how to check it."""

from collections.abc import Mapping
from typing import Any

from k3quant import __version__
from k3quant.convert.export_plan import ExportPlan
from k3quant.convert.proof import PROOF_FILE

CARD_FILE = "README.md"


def encode_card(plan: ExportPlan, summary: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the card.

    Args:
        plan: The export.
        summary: The proof's sums, by family and format.
    """
    rows = [
        f"| {key} | {n['weights']:,} | {n['exact']:,} | {n['blocks_rescued']:,} | "
        f"{n['max_abs']:.3g} | {_decibel(n['worst_sqnr_db'])} |"
        for key, n in summary.items()
    ]
    lines = [
        "---",
        "base_model: moonshotai/Kimi-K3",
        "license: other",
        "license_name: kimi-k3",
        "---",
        "",
        f"# {plan.target} ({plan.scheme})",
        "",
        f"Made by k3quant {__version__} from the released MXFP4 checkpoint.",
        "",
        "| weights | count | exact | blocks rescued | largest error | worst SQNR |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"`{PROOF_FILE}` says for every weight what was kept, and names the sha256 of every file.",
        "`k3quant verify .` checks them.",
    ]
    if plan.transforms:
        lines += ["", "Changes that the target asks for:", ""]
        lines += [f"- {what}: {how}" for what, how in plan.transforms.items()]
    if plan.skipped:
        lines += ["", f"{len(plan.skipped)} source tensors have no place in this target."]
    return ("\n".join(lines) + "\n").encode()


def _decibel(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"
