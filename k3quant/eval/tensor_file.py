"""Torch tensors in a safetensors file, bit for bit."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3quant.checkpoint.folder import fill, read_range
from k3quant.checkpoint.header import Header, scan_header
from k3quant.checkpoint.reader import raise_first
from k3quant.checkpoint.writer import ShardWriter, WrittenFile
from k3quant.errors import IncompleteError
from k3quant.formats.dtypes import torch_dtype

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def raw_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, from wherever it is."""
    raw: npt.NDArray[np.uint8] = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return raw


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write tensors to a file, whole or not at all; its digest is not computed.

    Raises:
        ResourceError: The system refused.
    """
    entries = [(name, NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()]
    with ShardWriter(path, entries, digest=False) as writer:
        for name, tensor in tensors.items():
            writer.write(name, raw_bytes(tensor))
    return writer.written


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file.

    Raises:
        IncompleteError: The file is gone or short.
        StructureError: It is malformed.
        ResourceError: The system refused a read.
    """
    tensors = {}
    with _opened(path) as (header, fd):
        for name, entry in header.tensors.items():
            raw = np.empty(entry.end - entry.begin, dtype=np.uint8)
            got = fill(fd, path.name, header.data_start + entry.begin, memoryview(raw.data))
            if got < len(raw):
                raise IncompleteError(f"{path}: expected {len(raw)} bytes of {name}, got {got}")
            dtype, count = torch_dtype(entry.dtype), math.prod(entry.shape)
            values = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
            tensors[name] = values.reshape(entry.shape)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Read what a file says about itself; raises as `read_tensors`."""
    with _opened(path) as (header, _):
        return header.metadata


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Header, int]]:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise IncompleteError(f"{path}: expected a safetensors file, got nothing") from error
    with file:
        fd = file.fileno()
        scan = scan_header(
            lambda offset, length: read_range(fd, path.name, offset, length),
            file=path.name,
            file_bytes=path.stat().st_size,
        )
        raise_first(scan.findings)
        assert scan.header is not None
        yield scan.header, fd
