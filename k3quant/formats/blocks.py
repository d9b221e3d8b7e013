"""Cut the last dimension into runs of equal length, one scale a run, and check what came along.

A run is a block under an MX scale and a group under an INT4 or NVFP4 scale.
"""

import torch
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats import faults


def split_runs(tensor: Tensor, run: int) -> Tensor:
    """View `[..., cols]` as `[..., cols / run, run]`.

    Raises:
        SchemaError: The columns are no multiple of `run`: a short last run has no defined scale.
    """
    *lead, cols = tensor.shape
    if cols % run:
        raise SchemaError(
            f"columns: expected a multiple of {run}, got {cols}",
            hint=f"keep this tensor in a format without runs of {run}",
        )
    return tensor.reshape(*lead, cols // run, run)


def join_runs(tensor: Tensor) -> Tensor:
    """View `[..., runs, run]` as `[..., runs * run]`."""
    return tensor.flatten(-2)


def amax_of_runs(runs: Tensor) -> Tensor:
    """Return the largest magnitude of each run.

    Args:
        runs: `[..., runs, run]` floating.

    Returns:
        `[..., runs]` in the dtype of `runs`.

    Raises:
        ValuesError: A value is NaN or infinite, so no scale can hold its run; names the first.
    """
    amax = runs.abs().amax(dim=-1)
    bad = ~torch.isfinite(amax)
    if bool(bad.any()):
        raise faults.not_finite(first_place(bad), int(bad.sum()))
    return amax


def scale_of_amax(amax: Tensor, divisor: float) -> Tensor:
    """Return amax / divisor, and 1.0 for zero.

    Args:
        amax: Any shape, float32, finite.
        divisor: The amax that shall get scale 1.0.

    Returns:
        float32 in the same shape, never below 2^-126: a subnormal scale has too few bits to
        divide by.
    """
    smallest = torch.finfo(torch.float32).tiny
    return quotient(amax, divisor).clamp(min=smallest).masked_fill(amax == 0, 1.0)


def quotient(dividend: Tensor, divisor: float) -> Tensor:
    """Divide by one number, with the same bits on every device.

    By a Python number, torch multiplies with the reciprocal on CUDA; by a tensor it divides.

    Args:
        dividend: Any shape, floating.
        divisor: A number that the dtype of `dividend` holds.
    """
    return dividend / dividend.new_tensor(divisor)


def check_shape(what: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse a companion tensor of another shape, also one that would broadcast.

    Raises:
        SchemaError: The shape differs.
    """
    if tuple(tensor.shape) != expected:
        raise SchemaError(f"{what}: expected {list(expected)}, got {list(tensor.shape)}")


def check_packed(packed: Tensor, scale: Tensor, run: int) -> None:
    """Refuse packed nibbles and a scale grid that do not belong together.

    Args:
        packed: `[..., cols / 2]` uint8.
        scale: `[..., cols / run]`, one a run.
        run: Elements a run.

    Raises:
        SchemaError: The shapes do not fit.
    """
    half = run // 2
    if packed.shape[-1] % half:
        raise SchemaError(f"packed columns: expected a multiple of {half}, got {packed.shape[-1]}")
    check_shape("scale grid", scale, (*packed.shape[:-1], packed.shape[-1] // half))


def check_positive(scale: Tensor) -> None:
    """Refuse scales that are not finite and positive.

    Args:
        scale: Any shape, floating.

    Raises:
        ValuesError: Names the first and says how many.
    """
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        where = f"scale {bad.nonzero()[0].tolist()}"
        raise faults.bad_scale(where, float(scale[bad][0]), int(bad.sum()))


def check_overflow(runs: Tensor, scale: Tensor) -> None:
    """Refuse decoded runs that hold an infinity.

    Args:
        runs: `[..., runs, run]` decoded values in their final dtype.
        scale: `[..., runs]` stored scales, for the message.

    Raises:
        ValuesError: Names the first run, its scale and the dtype.
    """
    bad = torch.isinf(runs).any(dim=-1)
    if bool(bad.any()):
        dtype = str(runs.dtype).removeprefix("torch.")
        cause = f"infinity under scale {scale[bad][0].item()}"
        raise faults.overflow(first_place(bad), dtype, cause)


def first_place(marks: Tensor) -> str:
    """Name the first marked run.

    Args:
        marks: `[..., runs]` bool, at least one set.
    """
    *row, run = marks.nonzero()[0].tolist()
    return faults.place(row, run)
