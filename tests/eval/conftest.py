import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.eval.checkpoint_model import CheckpointModel

Edit = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: for small tensors two mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden(data: Path) -> dict[str, torch.Tensor]:
    """Return the golden tensors of the text model."""
    return load_file(data / "oracle" / "golden" / "text.safetensors")


@pytest.fixture(scope="session")
def open_model() -> Callable[[Path], CheckpointModel]:
    """Return a function that opens a folder in float32, reading one tensor at a time."""

    def opened(folder: Path) -> CheckpointModel:
        checkpoint = open_checkpoint(folder)
        return CheckpointModel(checkpoint, dtype=torch.float32, ahead_bytes=1 << 20, threads=1)

    return opened


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a function that makes a writable copy of a checkpoint."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def edit_tensor() -> Callable[[Path, str, Edit], None]:
    """Return a function that rewrites one tensor of a copied checkpoint."""

    def edit(folder: Path, name: str, change: Edit) -> None:
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                if name not in file.keys():  # noqa: SIM118  no mapping
                    continue
            tensors = load_file(shard)
            tensors[name] = change(tensors[name].clone()).contiguous()
            save_file(tensors, shard)
            return
        raise AssertionError(f"no tensor {name}")

    return edit


@pytest.fixture
def write_ids(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes documents of ids as JSON lines."""

    def write(*documents: list[int], name: str = "ids.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{[int(i) for i in ids]}\n" for ids in documents))
        return path

    return write


@pytest.fixture(scope="session")
def some_ids() -> Callable[..., np.ndarray]:
    """Return a function that draws ids below the tiny vocabulary's 608."""

    def draw(count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 352, count)

    return draw
