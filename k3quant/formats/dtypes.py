"""The element types a safetensors file can name: bits, file order, numpy and torch spelling.

Torch-free: `torch_dtype` imports torch when it is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One safetensors element type.

    Attributes:
        name: Spelling in a header.
        bits: Bits of one element; 4 and 6 for types that lie packed without gaps.
        rank: Place in safetensors' own enumeration. A writer lays tensors out by descending rank,
            then by ascending name, so that wide elements stay aligned.
        numpy_name: Attribute of numpy with the same bits, None where numpy has no such type.
        torch_name: Attribute of torch with the same bits, None where torch has no such type.
    """

    name: str
    bits: int
    rank: int
    numpy_name: str | None
    torch_name: str | None

    def byte_count(self, count: int) -> int:
        """Return the bytes that `count` elements take.

        Raises:
            ValueError: The elements do not fill whole bytes.
        """
        whole, rest = divmod(count * self.bits, 8)
        if rest:
            raise ValueError(f"{self.name}: expected whole bytes, got {count} of {self.bits} bits")
        return whole


# name, bits, numpy, torch, in the order of safetensors' enumeration
_ROWS: tuple[tuple[str, int, str | None, str | None], ...] = (
    ("BOOL", 8, "bool_", "bool"),
    ("F4", 4, None, None),  # torch's float4_e2m1fn_x2 is a pair, not an element
    ("F6_E2M3", 6, None, None),
    ("F6_E3M2", 6, None, None),
    ("U8", 8, "uint8", "uint8"),
    ("I8", 8, "int8", "int8"),
    ("F8_E5M2", 8, None, "float8_e5m2"),
    ("F8_E4M3", 8, None, "float8_e4m3fn"),
    ("F8_E8M0", 8, None, "float8_e8m0fnu"),
    ("I16", 16, "int16", "int16"),
    ("U16", 16, "uint16", "uint16"),
    ("F16", 16, "float16", "float16"),
    ("BF16", 16, None, "bfloat16"),
    ("I32", 32, "int32", "int32"),
    ("U32", 32, "uint32", "uint32"),
    ("F32", 32, "float32", "float32"),
    ("C64", 64, "complex64", "complex64"),
    ("F64", 64, "float64", "float64"),
    ("I64", 64, "int64", "int64"),
    ("U64", 64, "uint64", "uint64"),
)

DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        name: DType(name=name, bits=bits, rank=rank, numpy_name=numpy_name, torch_name=torch_name)
        for rank, (name, bits, numpy_name, torch_name) in enumerate(_ROWS)
    }
)
"""Every type by its header name, in safetensors' order.

Source: huggingface/safetensors, `safetensors/src/tensor.rs`, enumeration `Dtype` and `bitsize`.
"""

_BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DTYPES.values() if dtype.torch_name}


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch dtype of a safetensors type.

    Args:
        name: Header name such as `BF16`.

    Raises:
        ValueError: The name is unknown, or torch has no such element.
    """
    import torch

    dtype = DTYPES.get(name)
    if dtype is None or dtype.torch_name is None:
        raise ValueError(f"dtype: expected one that torch has, got `{name}`")
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def dtype_of_torch(dtype: "torch.dtype") -> DType:
    """Return the safetensors type of a torch dtype.

    Raises:
        ValueError: safetensors cannot store the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_TORCH_NAME:
        raise ValueError(f"dtype: expected one that safetensors stores, got `{name}`")
    return _BY_TORCH_NAME[name]
