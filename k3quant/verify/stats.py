"""Statistics of each tensor, gathered while its bytes stream by."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.verify.values import Bytes, ValueCheck

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BLOCK_BYTES = 16  # packed bytes of one MXFP4 block


@dataclass(slots=True)
class TensorStats:
    """Counts over one tensor; give it the tensor's bytes in order.

    Attributes:
        check: The tensor.
        histogram: Byte counts, for packed codes, scale bytes and E4M3.
        absmax: Largest finite magnitude of a float tensor.
        nan: NaN count of a float tensor.
        inf: Infinity count of a float tensor.
        zeros: Zero count of a float tensor.
        zero_blocks: Whole all-zero blocks of 32 codes.
    """

    check: ValueCheck
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    absmax: float = 0.0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    zero_blocks: int = 0
    _rest: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    def add(self, piece: Bytes) -> None:
        """Count the next bytes."""
        check = self.check
        if check.dtype in _FLOATS or check.dtype == "BF16":
            self._add_floats(piece)
            return
        if check.kind != "bytes":
            self.histogram += np.bincount(piece, minlength=256)
        if check.kind == "packed":
            whole = np.concatenate([self._rest, piece]) if self._rest.size else piece
            count = whole.size // _BLOCK_BYTES
            blocks = whole[: count * _BLOCK_BYTES].reshape(count, _BLOCK_BYTES)
            # Both halves of a block without their sign bits
            magnitudes = blocks.view(np.uint64) & np.uint64(0x7777777777777777)
            self.zero_blocks += int(np.count_nonzero(~magnitudes.any(axis=1)))
            self._rest = whole[count * _BLOCK_BYTES :].copy()

    def _add_floats(self, piece: Bytes) -> None:
        if self.check.dtype == "BF16":
            values = (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = piece.view(_FLOATS[self.check.dtype])
        finite = np.isfinite(values)
        self.nan += int(np.count_nonzero(np.isnan(values)))
        self.inf += int(values.size - np.count_nonzero(finite)) - int(
            np.count_nonzero(np.isnan(values))
        )
        self.zeros += int(np.count_nonzero(values == 0))
        magnitude = np.abs(values[finite] if not finite.all() else values)
        if magnitude.size:
            self.absmax = max(self.absmax, float(magnitude.max()))

    def to_json(self) -> dict[str, Any]:
        """Return the counts that make sense for the tensor's kind."""
        check, histogram = self.check, self.histogram
        document: dict[str, Any] = {"dtype": check.dtype, "shape": list(check.shape)}
        if check.dtype in _FLOATS or check.dtype == "BF16":
            counts = {"absmax": self.absmax, "nan": self.nan, "inf": self.inf, "zeros": self.zeros}
            return document | counts
        if check.kind == "packed":
            table = histogram.reshape(16, 16)
            codes = table.sum(axis=0) + table.sum(axis=1)
            total = max(int(codes.sum()), 1)
            largest = max((c & 7 for c in range(16) if codes[c]), default=0)
            return document | {
                "codes": [int(n) for n in codes],
                "absmax_code": _E2M1[largest],
                "saturated_share": int(codes[7] + codes[15]) / total,
                "negative_zeros": int(codes[8]),
                "zero_blocks": self.zero_blocks,
            }
        if check.kind in {"e8m0", "e4m3", "e4m3-scale"}:
            nan = int(histogram[255]) + (int(histogram[127]) if check.kind != "e8m0" else 0)
            document["bytes"] = {str(b): int(histogram[b]) for b in np.nonzero(histogram)[0]}
            document["nan"] = nan
        return document


def encode_stats(tensors: dict[str, dict[str, Any]]) -> bytes:
    """Encode the statistics of many tensors for their file."""
    return (json.dumps({"tensors": tensors}, indent=1) + "\n").encode()
