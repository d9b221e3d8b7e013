"""What a conversion kept and lost: one record a weight, sums a family, digests of every file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3quant.checkpoint.output_file import WrittenFile
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.error import WeightError
from k3quant.manifest import PROOF_FILE

__all__ = ["PROOF_FILE", "WeightProof", "encode_proof", "summarize"]

FORMAT = "k3quant-proof"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProof:
    """What happened to one weight.

    Attributes:
        module: Name of the weight's module, or the full name of a tensor without one.
        family: Family of the table.
        source: How it was stored.
        target: How it is stored now; the same word as `source` means its bytes were kept.
        exact: Whether every decoded value is unchanged.
        counts: Blocks kept, rescued and lost, for a cast from MXFP4.
        error: How far values moved, where they did.
    """

    module: str
    family: str
    source: str
    target: str
    exact: bool
    counts: CastCounts | None = None
    error: WeightError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record in its published form; what does not apply is left out."""
        record: dict[str, Any] = {
            "family": self.family, "source": self.source, "target": self.target,
            "exact": self.exact,
        }  # fmt: skip
        if self.counts is not None:
            counts = self.counts
            record |= {
                "blocks": counts.blocks,
                "blocks_exact": counts.exact,
                "blocks_rescued": counts.rescued,
                "saturated": counts.saturated,
                "flushed": counts.flushed,
            }
        if self.error is not None and not self.exact:
            error = self.error
            record |= {
                "elements": error.count,
                "max_abs": error.max_abs,
                "rel_rms": error.rel_rms,
                "sqnr_db": error.sqnr_db,
                "saturated": error.saturated or 0,
                "flushed": error.flushed,
            }
        return record

    @staticmethod
    def from_json(module: str, record: Mapping[str, Any]) -> "WeightProof":
        """Return a record from its published form."""
        counts = error = None
        if "blocks" in record:
            counts = CastCounts(
                blocks=record["blocks"],
                exact=record["blocks_exact"],
                rescued=record["blocks_rescued"],
                saturated=record["saturated"],
                flushed=record["flushed"],
            )
        if "max_abs" in record:
            error = WeightError(
                count=record["elements"],
                max_abs=record["max_abs"],
                rel_rms=record["rel_rms"],
                sqnr_db=record["sqnr_db"],
                saturated=record["saturated"],
                flushed=record["flushed"],
                not_finite=0,
                exact=record["exact"],
            )
        return WeightProof(
            module=module,
            family=record["family"],
            source=record["source"],
            target=record["target"],
            exact=record["exact"],
            counts=counts,
            error=error,
        )


def summarize(proofs: Iterable[WeightProof]) -> dict[str, dict[str, Any]]:
    """Sum proofs by family and target, with a `total`."""
    sums: dict[str, dict[str, Any]] = {}
    for proof in proofs:
        for key in (f"{proof.family} -> {proof.target}", "total"):
            _add(sums.setdefault(key, _empty()), proof)
    return {key: sums[key] for key in sorted(sums, key=lambda key: (key == "total", key))}


def encode_proof(
    proofs: Sequence[WeightProof],
    *,
    job: Mapping[str, Any],
    source_files: Mapping[str, str | None],
    output_files: Sequence[WrittenFile],
    skipped: Mapping[str, str],
    transforms: Mapping[str, str],
) -> bytes:
    """Encode the proof of an export.

    Args:
        proofs: One a weight.
        job: Command line, versions, target, scheme and options.
        source_files: Digest of each source shard.
        output_files: Every weight file, with the digest read back from the disk.
        skipped: Source tensors without a place, with the reason.
        transforms: Changes that the target asks for.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "job": dict(job),
        "summary": summarize(proofs),
        "source": dict(source_files),
        "output": {file.file: {"bytes": file.size, "sha256": file.sha256} for file in output_files},
        "skipped": dict(skipped),
        "transforms": dict(transforms),
        "weights": {
            proof.module: proof.to_json()
            for proof in sorted(proofs, key=lambda proof: proof.module)
        },
    }
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def _empty() -> dict[str, Any]:
    return {
        "weights": 0, "exact": 0, "blocks": 0, "blocks_exact": 0, "blocks_rescued": 0,
        "saturated": 0, "flushed": 0, "max_abs": 0.0, "worst_sqnr_db": None,
    }  # fmt: skip


def _add(total: dict[str, Any], proof: WeightProof) -> None:
    record = proof.to_json()
    total["weights"] += 1
    total["exact"] += proof.exact
    for key in ("blocks", "blocks_exact", "blocks_rescued", "saturated", "flushed"):
        total[key] += record.get(key, 0)
    total["max_abs"] = max(total["max_abs"], record.get("max_abs", 0.0))
    ratio = record.get("sqnr_db")
    if ratio is not None and (total["worst_sqnr_db"] is None or ratio < total["worst_sqnr_db"]):
        total["worst_sqnr_db"] = ratio
