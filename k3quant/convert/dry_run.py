"""What a dry run can promise: sizes from headers, exactness from scale bytes alone."""

from collections import defaultdict
from typing import Any

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.choice import Format
from k3quant.convert.export_plan import ExportPlan
from k3quant.convert.units import CopyUnit, ExpertUnit
from k3quant.formats.mx import E8M0_NAN
from k3quant.formats.octaves import E4M3_SCALE_EXPONENTS
from k3quant.progress import SILENT, Progress
from k3quant.schemes.gguf_units import BlocksUnit
from k3quant.schemes.mlx_units import StackUnit

# Every MXFP4 value is one of these formats' values, whatever its scale.
_ALWAYS = frozenset({Format.KEEP, Format.MXFP4, Format.MXFP8})
# bfloat16 holds every product of a code and a scale up to 2^125.
_BF16_LARGEST_SCALE = 252


def exactness(
    checkpoint: Checkpoint, plan: ExportPlan, progress: Progress = SILENT
) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the expert matrices whose scale bytes alone prove the cast exact.

    Args:
        checkpoint: The source.
        plan: The export.
        progress: Told the bytes of scales read.

    Returns:
        By family and format, matrices proven exact and matrices in all. What scales cannot decide
        (a rescue by octaves, INT4 and INT8) counts as not proven.
    """
    units = [u for file in plan.files for u in file.units if isinstance(u, ExpertUnit)]
    scales = [m.scale for unit in units for m in unit.matrices]
    progress.start("scales", sum(checkpoint.entry(name).length for name in scales), "B")
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for unit in units:
        spans = []
        for matrix in unit.matrices:
            found = checkpoint.read(matrix.scale)
            progress.advance(found.nbytes)
            spans.append((int(found.min()), int(found.max())))
        for group in unit.shared:
            low = min(spans[i][0] for i in group)
            high = max(spans[i][1] for i in group)
            for i in group:
                if i not in unit.written:
                    continue
                form = unit.matrices[i].choice.format
                total = counts[unit.family, form.value]
                total[0] += _is_proven(form, low, high, spans[i])
                total[1] += 1
    for file in plan.files:
        for other in file.units:
            if isinstance(other, CopyUnit | BlocksUnit | StackUnit):
                # Bytes that are kept, or rearranged without changing one
                target = "keep" if isinstance(other, CopyUnit) else "mxfp4"
                total = counts[other.family, target]
                total[0] += 1
                total[1] += 1
    return {key: (done, total) for key, (done, total) in counts.items()}


def forecast(plan: ExportPlan, proven: dict[tuple[str, str], tuple[int, int]]) -> dict[str, Any]:
    """Return what a dry run prints, ready for JSON."""
    families = []
    for f in plan.forecasts:
        known = proven.get((f.family, f.target))
        families.append(
            {
                "family": f.family,
                "target": f.target,
                "tensors": f.tensors,
                "source_bytes": f.source_bytes,
                "target_bytes": f.target_bytes,
                "exact": "" if known is None else f"{known[0]:,} of {known[1]:,}",
            }
        )
    return {
        "target": plan.target,
        "scheme": plan.scheme,
        "files": len(plan.files),
        "target_bytes": sum(file.file_bytes for file in plan.files),
        "families": families,
        "skipped": dict(plan.skipped),
    }


def _is_proven(target: Format, low: int, high: int, own: tuple[int, int]) -> bool:
    if own[1] == E8M0_NAN:
        return False
    if target in _ALWAYS:
        return True
    if target is Format.BF16:
        return own[1] <= _BF16_LARGEST_SCALE
    if target is Format.NVFP4:
        smallest, largest = E4M3_SCALE_EXPONENTS
        return high - low <= largest - smallest
    if target in (Format.FP8_BLOCK, Format.FP8_CHANNEL):
        # E4M3 holds 0.5 * 2^-8 to 6 * 2^6 exactly, so scales may span 14 octaves.
        return own[1] - own[0] <= 14
    return False
