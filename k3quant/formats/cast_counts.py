"""What a cast kept and what it lost, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCounts:
    """Counts over one weight, or over several that were added.

    Attributes:
        blocks: MXFP4 blocks of 32 that were cast.
        exact: Blocks of which every value is unchanged.
        rescued: Exact blocks that are so only because their codes moved by some octaves.
        saturated: Elements cut to the largest value of their new scale.
        flushed: Elements not zero before and zero after.
    """

    blocks: int
    exact: int
    rescued: int = 0
    saturated: int = 0
    flushed: int = 0

    @property
    def lossless(self) -> bool:
        """Whether every value is unchanged."""
        return self.exact == self.blocks

    def __add__(self, other: "CastCounts") -> "CastCounts":
        """Return the counts over both casts."""
        return CastCounts(
            blocks=self.blocks + other.blocks,
            exact=self.exact + other.exact,
            rescued=self.rescued + other.rescued,
            saturated=self.saturated + other.saturated,
            flushed=self.flushed + other.flushed,
        )
