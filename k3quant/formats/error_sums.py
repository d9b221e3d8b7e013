"""The sums behind a `WeightError`, as kernels count them, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    """Sums over pairs of elements; what is not finite counts in the first two alone.

    Attributes:
        count: Elements compared.
        equal: Elements of the same value; -0.0 equals 0.0, NaN equals nothing.
        max_abs: Largest |candidate - reference|.
        noise: Sum of squared differences.
        signal: Sum of the reference's squares.
        flushed: Elements not zero in the reference and zero in the candidate.
    """

    count: int = 0
    equal: int = 0
    max_abs: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    flushed: int = 0

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        """Return the sums over both."""
        return ErrorSums(
            count=self.count + other.count,
            equal=self.equal + other.equal,
            max_abs=max(self.max_abs, other.max_abs),
            noise=self.noise + other.noise,
            signal=self.signal + other.signal,
            flushed=self.flushed + other.flushed,
        )
