"""Random bytes that depend on a seed and a tensor's name alone, from any offset on.

Word i of a tensor is the SplitMix64 mix of `key + step * i`; both come from the sha256 of seed and
name. So a tensor is the same in every cut, file and order of writing, and its pieces can be made
in any order.

Source: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3quant.formats.jit import compiled

WORD_BYTES = 8
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Stream:
    """The random words of one tensor: where they start and how the counter steps."""

    key: int
    step: int

    @classmethod
    def of(cls, seed: int, name: str) -> "Stream":
        """Return the stream of a tensor.

        Args:
            seed: Seed of the checkpoint.
            name: Name of the tensor.
        """
        digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
        key, step = struct.unpack_from("<QQ", digest)
        return cls(key, step | 1)

    def fill(self, words: npt.NDArray[np.uint64], first: int) -> None:
        """Fill a buffer with words from number `first` on."""
        compiled(_fill)(words, np.uint64(self.key), np.uint64(self.step), np.uint64(first))


def look_up(
    values: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], table: npt.NDArray[Any]
) -> None:
    """Replace every value by the table's entry of that number, in place."""
    compiled(_look_up)(values, table)


def _fill(words: npt.NDArray[np.uint64], key: np.uint64, step: np.uint64, first: np.uint64) -> None:
    for i in range(words.shape[0]):
        x = key + step * (first + np.uint64(i))
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
        words[i] = x ^ (x >> np.uint64(31))


def _look_up(
    values: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], table: npt.NDArray[Any]
) -> None:
    for i in range(values.shape[0]):
        values[i] = table[values[i]]
