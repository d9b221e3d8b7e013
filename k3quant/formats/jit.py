"""Compile a loop with numba when it is first called, and run it over a range on several threads.

Kernels release the interpreter lock and are split over Python threads: numba's own parallel loops
end the process when two threads of a caller enter them at once, or after a fork.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
Result = TypeVar("Result")

RUNS_PER_THREAD = 8192
"""Below this many runs of 32 elements a thread costs more than it saves."""


@cache
def compiled(kernel: Kernel) -> Kernel:
    """Return the machine code of a loop, compiled once and kept on disk where that is possible.

    Args:
        kernel: A module-level function over numpy arrays and scalars.

    Returns:
        A function of the same arguments that releases the interpreter lock.
    """
    import numba

    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(kernel))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Kernel, numba.njit(nogil=True)(kernel))


def over_runs(
    work: Callable[[int, int], Result], runs: int, threads: int, *, least: int = RUNS_PER_THREAD
) -> list[Result]:
    """Call `work(start, stop)` on consecutive ranges that cover `runs`.

    Args:
        work: Handles one range; called from several threads at once.
        runs: Number of runs; 0 makes one call on an empty range.
        threads: Upper bound of threads, the calling one included.
        least: Runs that make one more thread worth its start.

    Returns:
        The results in the order of the ranges.

    Raises:
        ValueError: `threads` is not positive.
    """
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    parts = max(1, min(threads, runs // least))
    edges = [runs * part // parts for part in range(parts + 1)]
    ranges = list(pairwise(edges))
    if parts == 1:
        return [work(*ranges[0])]
    with ThreadPoolExecutor(parts - 1, thread_name_prefix="k3quant-kernel") as pool:
        others = [pool.submit(work, *bounds) for bounds in ranges[1:]]
        return [work(*ranges[0]), *(other.result() for other in others)]


def frozen(array: npt.NDArray[np.generic], name: str) -> npt.NDArray[Any]:
    """Return a read-only view, so that mapped and writable input share one compilation.

    Raises:
        ValueError: The array is not contiguous in C order.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a contiguous array, got strides {array.strides}")
    view = array.view()
    view.flags.writeable = False
    return view
