"""Byte counts and times as people write and read them."""

import re

from k3quant.errors import UsageError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGTP", start=1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGTP", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Read a size such as `5GB` (decimal), `512MiB` (binary) or `4096` as bytes.

    Raises:
        UsageError: The text is no positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    size = round(float(match[1]) * factor) if match and factor else 0
    if size <= 0:
        raise UsageError(
            f"size: expected a number with B, KB, MB, GB, KiB, MiB or GiB, got `{text}`"
        )
    return size


def format_size(count: int) -> str:
    """Write a byte count with the largest decimal unit that leaves a number of at least one."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.3f} TB"


def format_duration(seconds: float) -> str:
    """Write a time with its two largest units; below a minute in seconds."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
