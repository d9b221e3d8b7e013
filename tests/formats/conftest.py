from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file
from torch import Tensor

# First calls import or compile, and machines are shared: a deadline would test those.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keep tensors of a few elements off the thread pool, which stalls on busy machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    """Vectors of compressed-tensors 0.20.0, torchao 0.18.0 and nvidia-modelopt 0.47.0."""
    return load_file(Path(__file__).parents[1] / "data" / "numerics.safetensors")


@pytest.fixture
def random_mxfp4() -> tuple[Tensor, Tensor]:
    """A weight of 48 x 256 with every packed byte, scale bytes 100 to 127 and some zero blocks."""
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (48, 128), dtype=torch.uint8, generator=generator)
    packed[3, :32] = 0
    packed[4, 16:24] = 0x88
    scale = torch.randint(100, 128, (48, 8), dtype=torch.uint8, generator=generator)
    return packed, scale
