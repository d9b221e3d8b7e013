"""Every kernel meets its reference twice: in triton's interpreter, and compiled on a GPU.

Triton decides between the two when a kernel is defined, so a run does one of them: the GPU where
there is one, unless TRITON_INTERPRET=1 asks for the interpreter.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

_DEFAULT = "0" if torch.cuda.is_available() else "1"
INTERPRETS = os.environ.setdefault("TRITON_INTERPRET", _DEFAULT) == "1"

if find_spec("triton") is None:  # triton exists for Linux on x86-64 alone
    collect_ignore_glob = ["test_*.py"]

SameBits = Callable[[torch.Tensor, torch.Tensor], bool]
ErrorRatio = Callable[[torch.Tensor, torch.Tensor], float]


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Return where the kernel's tensors live."""
    name: str = request.param
    if (name == "cpu") != INTERPRETS:
        pytest.skip("kernels are compiled in this run" if name == "cpu" else "needs a CUDA device")
    return name


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN or the largest integer, so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def same_bits() -> SameBits:
    """Return a comparison of shape, dtype and every bit, wherever the tensors live."""

    def compare(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(*(x.cpu().contiguous().view(torch.uint8) for x in (a, b)))

    return compare


@pytest.fixture(scope="session")
def error_ratio() -> ErrorRatio:
    """Return the length of the difference over that of the reference; NaN is never small."""

    def ratio(a: torch.Tensor, reference: torch.Tensor) -> float:
        x, y = a.cpu().double(), reference.cpu().double()
        return float((x - y).norm() / y.norm().clamp(min=1e-300))

    return ratio
