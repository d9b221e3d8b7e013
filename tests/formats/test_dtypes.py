import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save

from k3quant.formats.dtypes import DTYPES, dtype_of_torch, torch_dtype

_ORDER = (
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 C64 F64 "
    "I64 U64"
).split()
_IN_TORCH = [name for name in _ORDER if DTYPES[name].torch_name]


def test_ranks_follow_the_order_of_the_enumeration():
    assert [d.name for d in sorted(DTYPES.values(), key=lambda d: d.rank)] == _ORDER
    assert [DTYPES[name].rank for name in _ORDER] == list(range(20))


def test_safetensors_lays_tensors_out_by_descending_rank_then_name():
    tensors = {}
    for name in _IN_TORCH:
        tensors[f"b.{name}"] = torch.zeros(8, dtype=torch.uint8).view(torch_dtype(name))
        tensors[f"a.{name}"] = torch.zeros(8, dtype=torch.uint8).view(torch_dtype(name))
    import json

    raw = save(tensors)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    laid = sorted(header, key=lambda name: header[name]["data_offsets"])
    expected = sorted(header, key=lambda name: (-DTYPES[header[name]["dtype"]].rank, name))
    assert laid == expected
    assert {info["dtype"] for info in header.values()} == set(_IN_TORCH)


@pytest.mark.parametrize("name", _IN_TORCH)
def test_bits_are_torchs_and_the_name_comes_back(name):
    assert torch_dtype(name).itemsize * 8 == DTYPES[name].bits
    assert dtype_of_torch(torch_dtype(name)) is DTYPES[name]


@pytest.mark.parametrize("name", [name for name in _ORDER if DTYPES[name].numpy_name])
def test_bits_are_numpys(name):
    assert np.dtype(getattr(np, str(DTYPES[name].numpy_name))).itemsize * 8 == DTYPES[name].bits


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "nothing"])
def test_types_torch_lacks_are_refused(name):
    with pytest.raises(ValueError, match="one that torch has"):
        torch_dtype(name)


def test_torch_types_safetensors_lacks_are_refused():
    with pytest.raises(ValueError, match="complex128"):
        dtype_of_torch(torch.complex128)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [("F4", 32, 16), ("F6_E2M3", 4, 3), ("BF16", 3, 6), ("U64", 0, 0)],
    ids=["two-a-byte", "four-in-three-bytes", "two-bytes", "empty"],
)
def test_byte_count(name, count, expected):
    assert DTYPES[name].byte_count(count) == expected


def test_byte_count_refuses_half_bytes():
    with pytest.raises(ValueError, match="whole bytes"):
        DTYPES["F4"].byte_count(3)


def test_import_leaves_torch_and_numba_alone():
    code = (
        "import sys, k3quant.formats.dtypes as d; d.DTYPES['BF16'];"
        "assert not {'torch', 'numba', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
