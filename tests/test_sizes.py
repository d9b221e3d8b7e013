import pytest

from k3quant.errors import UsageError
from k3quant.sizes import format_duration, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5 kb", 1500)],
    ids=str,
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5 apples", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size: expected a number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1000, "1.00 KB"), (1_560_860_324_864, "1.561 TB")], ids=str
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (59, "59 s"), (90, "2 min"), (3_599, "1 h 00 min"),
     (12_000, "3 h 20 min")],
    ids=str,
)  # fmt: skip
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
