import numpy as np
import pytest
import torch

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert import buffers
from k3quant.convert.buffers import copy_bytes
from k3quant.errors import ValuesError
from k3quant.formats.error import ErrorSum
from k3quant.schemes import float_units
from k3quant.schemes.float_units import FloatUnit, encode_values

_NAME = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def checkpoint(nano):
    return open_checkpoint(nano)


class _Sink:
    """Collects what a unit writes."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}

    def __call__(self, name: str, offset: int, buffer: np.ndarray) -> None:
        assert name == "t"
        self.pieces[offset] = bytes(memoryview(buffer))

    def joined(self, start: int) -> bytes:
        """Return the bytes, which must follow each other from `start` on."""
        data = b""
        for offset in sorted(self.pieces):
            assert offset == start + len(data)
            data += self.pieces[offset]
        return data


def _run(checkpoint, dtype: str) -> tuple[_Sink, object]:
    unit = FloatUnit(
        source=_NAME, module="m", family="f", source_dtype="BF16", target="t", target_dtype=dtype,
        offset=640,
    )  # fmt: skip
    sink = _Sink()
    [proof] = unit.run(checkpoint, sink)
    return sink, proof


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "Q8_0"])
def test_pieces_join_to_the_whole(checkpoint, monkeypatch, dtype):
    whole, proof = _run(checkpoint, dtype)
    assert len(whole.pieces) == 1
    monkeypatch.setattr(float_units, "_ROW_ELEMENTS", 128 * 100)
    monkeypatch.setattr(buffers, "_COPY_BYTES", 100_001)
    pieces, again = _run(checkpoint, dtype)
    assert len(pieces.pieces) > 3
    assert pieces.joined(640) == whole.joined(640)
    assert (again.exact, again.target) == (proof.exact, dtype)
    assert (again.error is None) == (dtype in ("BF16", "F32"))
    if proof.error is not None:
        assert again.error.max_abs == proof.error.max_abs


def test_widening_is_exact_without_a_measurement(checkpoint):
    _, proof = _run(checkpoint, "F32")
    assert (proof.exact, proof.error, proof.source) == (True, None, "BF16")


def test_a_row_longer_than_a_piece_is_a_piece(checkpoint, monkeypatch):
    whole, _ = _run(checkpoint, "F32")
    monkeypatch.setattr(float_units, "_ROW_ELEMENTS", 1)
    pieces, _ = _run(checkpoint, "F32")
    assert len(pieces.pieces) == 2304
    assert pieces.joined(640) == whole.joined(640)


def test_first_bytes_alone_can_be_copied(checkpoint):
    sink = _Sink()
    copy_bytes(checkpoint, _NAME, sink, target="t", offset=3, length=10)
    assert sink.joined(3) == checkpoint.read(_NAME)[:10].tobytes()


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        (1.0, "F16", 0x3C00),
        (65504.0, "F16", 0x7BFF),
        (float("inf"), "F16", 0x7C00),
        (2.0**-26, "F16", 0),
        (1.00390625, "BF16", 0x3F80),  # tie to even
        (-0.0, "BF16", 0x8000),
    ],
    ids="one largest infinity flushed tie minus-zero".split(),
)
def test_narrowing(value, dtype, bits):
    sums = ErrorSum()
    data = encode_values(torch.tensor([[value]]), dtype, sums)
    assert data.view(np.uint16).tolist() == [bits]
    assert sums.result().flushed == (0 < abs(value) < 2**-25)


def test_finite_value_that_would_become_infinite_is_refused():
    with pytest.raises(ValuesError, match="values that F16 holds, got a magnitude of 70000"):
        encode_values(torch.tensor([[1.0, 70000.0]]), "F16", ErrorSum())
