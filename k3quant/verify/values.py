"""Values that cannot be right, found while a shard's bytes stream by.

Each check looks at whole tensors piece by piece; nothing is decoded. The tests on bits are chosen
so that one reduction without a copy answers "is anything wrong here", at memory speed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from k3quant.report import FaultClass, Finding, Severity, fault

Bytes = npt.NDArray[np.uint8]

_ZERO_STEP = 16  # words between two looks for a zero run: no run of 135 bytes can hide
_fault = partial(fault, FaultClass.VALUES)
_ZERO_ROWS = 8
_ZERO_BYTES = 4000  # a lost page; rows of the release are 1,536 and 1,792 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """What to check of one tensor.

    Attributes:
        name: The tensor.
        kind: `float`, `e8m0`, `e4m3`, `e4m3-scale`, `positive-scale`, `packed`, `padded`, `bytes`.
        dtype: Safetensors dtype.
        shape: Stored shape.
        live: Leading elements that count, where the rest must be zero padding.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    live: int | None = None


@dataclass(slots=True)
class _State:
    """What one tensor's pieces have shown so far."""

    nan: int = 0
    inf: int = 0
    first: int | None = None
    zero_run: int = 0
    zero_start: int = 0
    worst_start: int = 0
    worst_run: int = 0
    padding: list[tuple[int, float]] = field(default_factory=list)


_FLOAT_WORD = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64}
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


class TensorValues:
    """Checks one tensor; give it the tensor's bytes in order, in pieces of whole elements."""

    def __init__(self, check: ValueCheck) -> None:
        self.check = check
        self._state = _State()
        self._seen = 0
        self._look: Callable[[Bytes], None] = {
            "float": self._look_float,
            "positive-scale": self._look_positive,
            "padded": self._look_padded,
            "e8m0": self._look_e8m0,
            "e4m3": self._look_e4m3,
            "e4m3-scale": self._look_e4m3_scale,
            "packed": self._look_packed,
            "bytes": lambda _: None,
        }[check.kind]

    def add(self, piece: Bytes) -> None:
        """Look at the next bytes of the tensor."""
        if piece.size:
            self._look(piece)
            self._seen += piece.size

    def findings(self) -> Iterator[Finding]:
        """Yield what was wrong, once all bytes were seen."""
        state, check = self._state, self.check
        if state.nan or state.inf:
            yield self._bad_numbers()
        for index, value in state.padding:
            message = (
                f"{check.name}: expected zero padding after {check.live} heads, got {value!r} at "
                f"index {index}"
            )
            yield _fault("padding", check.name, message, got=repr(value))
        if check.kind == "packed":
            yield from self._zero_findings()

    def _bad_numbers(self) -> Finding:
        state, check = self._state, self.check
        assert state.first is not None
        cols = check.shape[-1] if check.shape else 1
        row, col = divmod(state.first, cols)
        word = {
            "e8m0": "NaN scales (0xFF)",
            "e4m3-scale": "NaN or negative scales",
            "positive-scale": "scales that are not finite and positive",
        }.get(check.kind)
        what = f"{state.nan} {word}" if word else f"{state.nan} NaN, {state.inf} Inf"
        unit = "group" if word and len(check.shape) > 1 else "column"
        message = (
            f"{check.name}: expected finite values, got {what}; first at row {row}, {unit} {col}"
        )
        return _fault("not-finite", check.name, message, got=what)

    def _zero_findings(self) -> Iterator[Finding]:
        state, check = self._state, self.check
        self._end_run()
        row_bytes = check.shape[-1]
        rows = check.shape[-2] if len(check.shape) > 1 else 1
        first_row = -(-state.worst_start // row_bytes)
        last_row = (state.worst_start + state.worst_run) // row_bytes
        whole_rows = max(last_row - first_row, 0)
        if state.worst_run == rows * row_bytes:
            yield Finding(
                code="zero-tensor",
                fault=FaultClass.VALUES,
                severity=Severity.WARNING,
                subject=check.name,
                message=f"{check.name}: expected non-zero codes, got an all-zero matrix",
            )
        elif whole_rows >= _ZERO_ROWS or state.worst_run >= _ZERO_BYTES:
            message = (
                f"{check.name}: expected codes, got {state.worst_run} zero bytes in a run "
                f"({whole_rows} all-zero packed rows from row {first_row}, "
                f"byte {state.worst_start})"
            )
            yield _fault("zero-run", check.name, message, got=str(state.worst_run))

    def _look_float(self, piece: Bytes) -> None:
        word = _FLOAT_WORD[self.check.dtype]
        bits = piece.view(word)
        infinity = _INFINITY[self.check.dtype]
        sign = 1 << (bits.itemsize * 8 - 1)
        # NaN and infinity are the largest patterns of either sign, so two maxima find both.
        if int(bits.view(_SIGNED[bits.itemsize]).max()) < infinity and (
            int(bits.max()) < (infinity | sign)
        ):
            return
        magnitude = bits & word(sign - 1)
        self._note(magnitude > infinity, bits.itemsize, nan=True)
        self._note(magnitude == infinity, bits.itemsize, nan=False)

    def _look_positive(self, piece: Bytes) -> None:
        bits = piece.view(_FLOAT_WORD[self.check.dtype])
        bad = (bits == 0) | (bits >= _INFINITY[self.check.dtype])  # the sign bit is the highest
        self._note(bad, bits.itemsize, nan=True)

    def _look_padded(self, piece: Bytes) -> None:
        self._look_float(piece)
        start = self._seen // np.dtype(_FLOAT_WORD[self.check.dtype]).itemsize
        if self.check.dtype == "BF16":
            values = (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = piece.view(np.dtype(f"f{np.dtype(_FLOAT_WORD[self.check.dtype]).itemsize}"))
        live = self.check.live or 0
        for index in np.nonzero(values)[0]:
            if start + int(index) >= live:
                self._state.padding.append((start + int(index), float(values[index])))

    def _look_e8m0(self, piece: Bytes) -> None:
        if int(piece.max()) == 0xFF:
            self._note(piece == 0xFF, 1, nan=True)

    def _look_e4m3(self, piece: Bytes) -> None:
        if int(piece.max()) == 0xFF or int(piece.view(np.int8).max()) == 0x7F:
            self._note((piece & 0x7F) == 0x7F, 1, nan=True)

    def _look_e4m3_scale(self, piece: Bytes) -> None:
        if int(piece.max()) > 0x7E:  # 0x7F is NaN, the codes above are negative
            self._note(piece > 0x7E, 1, nan=True)

    def _look_packed(self, piece: Bytes) -> None:
        words = piece[: piece.size // 8 * 8].view(np.uint64)
        if self._state.zero_run == 0 and words.size and words[::_ZERO_STEP].all():
            # No sampled word is zero: only a run at the end can matter, as the next piece's start.
            tail = piece[-_ZERO_STEP * 8 :]
            if int(tail[-1]) != 0:
                return
        self._measure_runs(piece)

    def _measure_runs(self, piece: Bytes) -> None:
        nonzero = np.nonzero(piece)[0]
        if nonzero.size == 0:
            self._extend_run(0, piece.size)
            return
        self._extend_run(0, int(nonzero[0]))
        self._end_run()
        gaps = np.diff(nonzero)
        if gaps.size:
            widest = int(gaps.argmax())
            self._keep(self._seen + int(nonzero[widest]) + 1, int(gaps[widest]) - 1)
        tail = piece.size - 1 - int(nonzero[-1])
        self._extend_run(piece.size - tail, tail)

    def _extend_run(self, start: int, length: int) -> None:
        if length:
            if self._state.zero_run == 0:
                self._state.zero_start = self._seen + start
            self._state.zero_run += length

    def _end_run(self) -> None:
        self._keep(self._state.zero_start, self._state.zero_run)
        self._state.zero_run = 0

    def _keep(self, start: int, length: int) -> None:
        if length > self._state.worst_run:
            self._state.worst_start, self._state.worst_run = start, length

    def _note(self, bad: npt.NDArray[np.bool_], item_bytes: int, *, nan: bool) -> None:
        count = int(np.count_nonzero(bad))
        if not count:
            return
        if nan:
            self._state.nan += count
        else:
            self._state.inf += count
        first = self._seen // item_bytes + int(bad.argmax())
        self._state.first = first if self._state.first is None else min(self._state.first, first)
