"""The values no format may hold, in words: one error a fault, for references and kernels alike."""

from collections.abc import Sequence

from k3quant.errors import ValuesError

_DAMAGED = "the checkpoint is damaged; fetch the shard again"


def place(row: Sequence[int], run: int, *, unit: str = "block") -> str:
    """Name a run of a tensor, as `row 3, block 0` or `row [1, 3], block 0`.

    Args:
        row: Indices of the leading dimensions; none for a tensor of one dimension.
        run: Index of the run within its row.
        unit: What the run is called.
    """
    named = str([int(i) for i in row]) if len(row) > 1 else str(int(row[0]) if row else 0)
    return f"row {named}, {unit} {run}"


def nan_scale(where: str, count: int) -> ValuesError:
    """Return the error for E8M0 byte 255."""
    return ValuesError(
        f"{where}: expected a scale byte below 255, got 255 (NaN) in {count} blocks", hint=_DAMAGED
    )


def bad_group_scale(where: str, byte: int, count: int) -> ValuesError:
    """Return the error for an E4M3 group scale that is NaN or carries a sign."""
    return ValuesError(
        f"{where}: expected a group scale byte up to 0x7e, got 0x{byte:02x} "
        f"and {count - 1} more such",
        hint=_DAMAGED,
    )


def bad_scale(where: str, scale: float, count: int) -> ValuesError:
    """Return the error for a floating scale that is not finite and positive."""
    return ValuesError(
        f"{where}: expected a finite positive scale, got {scale} and {count - 1} more such",
        hint=_DAMAGED,
    )


def nan_codes(where: str, count: int) -> ValuesError:
    """Return the error for E4M3 NaN among the elements."""
    return ValuesError(
        f"{where}: expected a number, got E4M3 NaN in {count} elements", hint=_DAMAGED
    )


def overflow(where: str, dtype: str, cause: str) -> ValuesError:
    """Return the error for decoded values beyond the target's range."""
    return ValuesError(
        f"{where}: expected values that {dtype} holds, got {cause}",
        hint="the scale is damaged, or the target needs a wider type",
    )


def not_finite(where: str, count: int) -> ValuesError:
    """Return the error for source values that are NaN or infinite, so that no scale fits them."""
    return ValuesError(
        f"{where}: expected finite values, got NaN or infinity in {count} places",
        hint="the source tensor is damaged; verify it",
    )
