"""Choose the power of two that becomes the NVFP4 tensor scale of an MXFP4 weight, without torch.

A half is 16 of the 32 elements of an MXFP4 block, which is one NVFP4 group. Its group scale is
2^(k - m) for block exponent k and tensor exponent m, and E4M3 holds 2^-9 to 2^8. A half whose
codes can move by octaves reaches further. Example: k from -14 to 3 fits m = -5 and no other m.
"""

import numpy as np
import numpy.typing as npt

from k3quant.formats.mx import E8M0_BIAS
from k3quant.formats.octaves import E4M3_SCALE_EXPONENTS, MAX_SHIFT

Needs = npt.NDArray[np.int64]
"""`[256, 4, 4]` int64: halves that are not all zero, by scale byte, by octaves their codes can
move down, 0..3, and by octaves they can move up, 0..3. Needs of tensors that share one scale are
added."""

NEEDS_SHAPE = (256, MAX_SHIFT + 1, MAX_SHIFT + 1)

SMALLEST_EXPONENT = -126
_EXPONENTS = np.arange(SMALLEST_EXPONENT, 127)


def best_exponent(needs: Needs) -> int:
    """Return the tensor exponent m under which nothing saturates and most halves are exact.

    Saturation is ruled out first: cutting the largest values of a tensor costs more than losing
    any number of values 2^17 times smaller. Among equals the one that moves fewest codes wins,
    then the one nearest to the largest block exponent less 8.

    Args:
        needs: Counts of the tensor, or the sum over the tensors that share the scale.

    Returns:
        m, -126..126; 0 for an all-zero tensor.
    """
    byte, down, up = np.nonzero(needs)
    if not len(byte):
        return 0
    count = needs[byte, down, up]
    exponent = byte - E8M0_BIAS
    smallest, largest = E4M3_SCALE_EXPONENTS
    lowest = int((exponent - largest - up).max())
    candidates = _EXPONENTS[max(0, min(lowest - SMALLEST_EXPONENT, 252)) :, None]
    exact = count * (candidates <= exponent - smallest + down)
    kept = count * ((exponent - largest <= candidates) & (candidates <= exponent - smallest))
    usual = int(exponent.max()) - largest
    scores = zip(
        exact.sum(axis=1).tolist(),
        kept.sum(axis=1).tolist(),
        (-abs(candidates[:, 0] - usual)).tolist(),
        strict=True,
    )
    best = max(range(len(candidates)), key=list(scores).__getitem__)
    return int(candidates[best, 0])
