import numpy as np
import pytest

from k3quant.verify.checks import value_check
from k3quant.verify.values import TensorValues, ValueCheck


def messages(check: ValueCheck, raw: bytes, *, pieces: int = 1) -> list[str]:
    values = TensorValues(check)
    data = np.frombuffer(raw, dtype=np.uint8)
    step = max(-(-data.size // pieces) // 8 * 8, 8)
    for start in range(0, data.size, step):
        values.add(data[start : start + step])
    return [finding.message for finding in values.findings()]


def words(dtype: type[np.generic], *values: int) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0xFF81])
@pytest.mark.parametrize("place", [0, 37, 63])
def test_every_form_of_nan_and_infinity_is_found_in_bf16(bits: int, place: int) -> None:
    array = np.full(64, 0x3F80, dtype=np.uint16)
    array[place] = bits
    check = value_check("norm.weight", "BF16", (8, 8), None)
    (message,) = messages(check, array.tobytes(), pieces=3)
    what = "0 NaN, 1 Inf" if bits & 0x7F == 0 else "1 NaN, 0 Inf"
    assert what in message
    assert f"row {place // 8}, column {place % 8}" in message


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        ("BF16", words(np.uint16, 0x7F7F, 0xFF7F, 0x0000, 0x8000, 0x0001)),
        ("F16", words(np.uint16, 0x7BFF, 0xFBFF, 0x8000, 0x0001)),
        ("F32", words(np.uint32, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 1)),
        ("F64", words(np.uint64, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 1 << 63)),
        ("F8_E4M3", bytes([0x7E, 0xFE, 0x00, 0x80])),
    ],
)
def test_largest_finite_values_pass(dtype: str, raw: bytes) -> None:
    assert messages(value_check("x.weight", dtype, (len(raw),), None), raw) == []


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_e4m3_nan_is_found(byte: int) -> None:
    raw = bytes([0x10] * 9 + [byte])
    assert "1 NaN" in messages(value_check("x.weight", "F8_E4M3", (2, 5), None), raw)[0]


def test_e8m0_zero_byte_is_legal_and_255_is_not() -> None:
    check = value_check("x.weight_scale", "U8", (2, 4), None)
    assert messages(check, bytes([0, 254, 127, 0, 1, 2, 3, 4])) == []
    assert "row 1, group 2" in messages(check, bytes([0, 0, 0, 0, 0, 0, 255, 0]))[0]


def test_padding_must_be_zero_and_finite() -> None:
    check = value_check("a.A_log", "F32", (8,), 4)
    healthy = np.array([1, 2, 3, 4, 0, 0, 0, 0], np.float32)
    assert messages(check, healthy.tobytes()) == []
    healthy[6] = np.nan
    assert any("1 NaN" in text for text in messages(check, healthy.tobytes()))
    healthy[6] = 2.5
    assert "2.5 at index 6" in messages(check, healthy.tobytes(), pieces=2)[0]


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 1, 4093, 50_000 - 4000])
def test_lost_page_is_found_wherever_pieces_are_cut(pieces: int, start: int) -> None:
    rng = np.random.default_rng(1)
    array = rng.integers(1, 256, 50_000, dtype=np.uint8)
    array[start : start + 4000] = 0
    check = value_check("e.weight_packed", "U8", (25, 2000), None)
    (message,) = messages(check, array.tobytes(), pieces=pieces)
    assert "4000 zero bytes in a run" in message
    assert f"byte {start})" in message


def test_single_zero_row_and_scattered_zeros_are_legal() -> None:
    array = np.random.default_rng(2).integers(0, 256, (25, 2000), dtype=np.uint8)
    array[3] = 0
    check = value_check("e.weight_packed", "U8", (25, 2000), None)
    assert messages(check, array.tobytes(), pieces=4) == []


def test_whole_zero_matrix_is_a_warning() -> None:
    check = value_check("e.weight_packed", "U8", (64, 32), None)
    values = TensorValues(check)
    values.add(np.zeros(64 * 32, np.uint8))
    assert [finding.severity for finding in values.findings()] == ["warning"]


@pytest.mark.parametrize("bits", [0, 0x80000000, 0xBF800000, 0x7F800000, 0x7FC00000])
def test_scalar_scales_must_be_finite_and_positive(bits: int) -> None:
    check = value_check("e.weight_global_scale", "F32", (1,), None)
    assert len(messages(check, words(np.uint32, bits))) == 1
    assert messages(check, words(np.uint32, 0x3F800000)) == []
