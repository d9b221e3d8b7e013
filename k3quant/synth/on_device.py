"""Synthetic values made on a GPU, byte for byte those of the processor.

Reference: `synth.values.Values.fill`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.errors import ResourceError
from k3quant.synth.stream import MIX_1, MIX_2, WORD_BYTES, Stream
from k3quant.synth.values import WIDE, Values


class DeviceValues:
    """Makes values on a device; tables are brought there once."""

    def __init__(self, device: torch.device) -> None:
        """Choose the device.

        Raises:
            ResourceError: torch cannot use it.
        """
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ResourceError(
                "device: expected a CUDA device, got none that torch can use",
                hint="install a build of torch with CUDA, or leave out --device",
            )
        self._device = device
        self._tables: dict[int, Tensor] = {}

    def fill(self, values: Values, stream: Stream, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of some elements; arguments as `Values.fill`."""
        wide = values.table is not None and len(values.table) == WIDE
        width = 2 if wide else 1
        skip, begin = first * width % WORD_BYTES, first * width // WORD_BYTES
        words = self._words(stream, begin, -(-(skip + count * width) // WORD_BYTES))
        raw = words.view(torch.uint8)[skip : skip + count * width]
        if values.table is None:
            return _to_host(raw)
        numbers = raw.view(torch.int16).int() & 0xFFFF if wide else raw.int()
        elements = self._table(values.table).index_select(0, numbers)
        if values.live is not None:
            elements[max(values.live - first, 0) :] = 0
        return _to_host(elements)

    def _words(self, stream: Stream, first: int, count: int) -> Tensor:
        """Return random words, `[count]` int64; its products wrap as unsigned ones do."""
        number = torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        x = number * _signed(stream.step) + _signed(stream.key)
        for shift, factor in ((30, MIX_1), (27, MIX_2)):
            x = (x ^ _shifted(x, shift)) * _signed(int(factor))
        return x ^ _shifted(x, 31)

    def _table(self, table: npt.NDArray[Any]) -> Tensor:
        found = self._tables.get(id(table))  # tables are made once and live for ever
        if found is None:
            bits = table.view({1: np.uint8, 2: np.int16, 4: np.int32}[table.itemsize])
            found = self._tables[id(table)] = torch.from_numpy(bits.copy()).to(self._device)
        return found


def _signed(word: int) -> int:
    """Return an unsigned 64-bit number as the signed one of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, where `>>` fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_host(values: Tensor) -> npt.NDArray[np.uint8]:
    raw: npt.NDArray[np.uint8] = values.cpu().view(torch.uint8).numpy()
    return raw
