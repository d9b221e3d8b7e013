"""What an MXFP4 weight holds, counted in one pass without torch: scales, codes, zero blocks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3quant.formats.fast_mxfp4 import check_pair
from k3quant.formats.jit import compiled, frozen, over_runs
from k3quant.formats.mx import E2M1_SIGN, E8M0_NAN, MX_BLOCK_SIZE

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Stats:
    """Counts over one weight, or over several that were added.

    Attributes:
        scales: `[256]` int64, blocks by scale byte.
        bytes: `[256]` int64, packed bytes by value.
        zero_blocks: Blocks whose 32 elements are all zero, of either sign.
    """

    scales: Counts
    bytes: Counts
    zero_blocks: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return int(self.scales.sum())

    @property
    def nan_blocks(self) -> int:
        """Blocks under scale byte 255."""
        return int(self.scales[E8M0_NAN])

    @property
    def codes(self) -> Counts:
        """`[16]` int64, elements by code."""
        table = self.bytes.reshape(16, 16)
        codes: Counts = table.sum(axis=0) + table.sum(axis=1)
        return codes

    @property
    def negative_zeros(self) -> int:
        """Elements of code 8."""
        return int(self.codes[E2M1_SIGN])

    def __add__(self, other: "Mxfp4Stats") -> "Mxfp4Stats":
        """Return the counts over both weights."""
        return Mxfp4Stats(
            scales=self.scales + other.scales,
            bytes=self.bytes + other.bytes,
            zero_blocks=self.zero_blocks + other.zero_blocks,
        )


def count_mxfp4(packed: Bytes, scale_e8m0: Bytes, *, threads: int = 1) -> Mxfp4Stats:
    """Count scale bytes, packed bytes and zero blocks.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous; 255 is counted like any other.
        threads: Upper bound of threads to use.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_pair(packed, scale_e8m0)
    source = frozen(packed, "packed").reshape(-1, _BLOCK_BYTES)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    kernel = compiled(_count_blocks)

    def count(start: int, stop: int) -> Mxfp4Stats:
        by_scale, by_byte = np.zeros(256, np.int64), np.zeros((4, 256), np.int64)
        zero_blocks = kernel(source[start:stop], scales[start:stop], by_scale, by_byte)
        return Mxfp4Stats(scales=by_scale, bytes=by_byte.sum(axis=0), zero_blocks=zero_blocks)

    total, *others = over_runs(count, len(scales), threads)
    for other in others:
        total = total + other
    return total


def nan_scale_places(scale_e8m0: Bytes, *, limit: int) -> list[tuple[int, ...]]:
    """Return the indices of scale bytes 255, the first `limit` of them in row order.

    Args:
        scale_e8m0: `[..., blocks]` uint8.
        limit: Most places to return.

    Returns:
        Index tuples of as many dimensions as `scale_e8m0`.
    """
    places = np.argwhere(scale_e8m0 == E8M0_NAN)[:limit]
    return [tuple(int(i) for i in index) for index in places]


def _count_blocks(
    packed: Bytes, scale_e8m0: Bytes, by_scale: Counts, by_byte: npt.NDArray[np.int64]
) -> int:
    """Add to both histograms; return the number of zero blocks.

    Four histograms take turns, so that equal neighbours do not wait for one counter.
    """
    zero_blocks = 0
    for block in range(scale_e8m0.shape[0]):
        by_scale[scale_e8m0[block]] += 1
        any_bits = np.uint8(0)
        for quad in range(0, 16, 4):
            for turn in range(4):
                byte = packed[block, quad + turn]
                by_byte[turn, byte] += 1
                any_bits |= byte
        zero_blocks += (any_bits & np.uint8(0x77)) == 0
    return zero_blocks
