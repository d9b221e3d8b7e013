"""Which tokens are read together and which of them are scored.

A window reads `ctx` ids and predicts the id after each. The first id of a document is never scored
and its last id is never read. With a stride below `ctx` windows overlap, and a window scores only
what no window before it has scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One run of tokens whose context starts fresh.

    Attributes:
        inputs: Ids that are read, `[T]`.
        targets: Ids that follow the last `len(targets)` inputs.
    """

    inputs: Ids
    targets: Ids


def plan_windows(
    documents: Sequence[Ids], *, ctx: int, stride: int, bos: int | None = None
) -> Iterator[Window]:
    """Yield the windows of each document in turn.

    Args:
        documents: Ids, `[n]` each; one with fewer than two has nothing to score.
        ctx: Ids a window reads.
        stride: Ids from one window's start to the next's, 1 to `ctx`.
        bos: Id put in front of every window, beyond `ctx` and never scored; None puts none.

    Raises:
        ValueError: The stride is out of range.
    """
    if not 1 <= stride <= ctx:
        raise ValueError(f"stride: expected 1 to ctx {ctx}, got {stride}")
    front = np.array([] if bos is None else [bos], dtype=np.int64)
    for ids in documents:
        num_inputs = len(ids) - 1
        scored = start = 0
        while scored < num_inputs:
            end = min(start + ctx, num_inputs)
            yield Window(
                inputs=np.concatenate((front, ids[start:end])), targets=ids[scored + 1 : end + 1]
            )
            scored, start = end, start + stride
