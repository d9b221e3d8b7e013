"""Fixtures that many tests share: the small checkpoints and the malformed ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
NANO = Path(__file__).parent.parent / "k3quant" / "nano"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of stored test data."""
    return DATA


@pytest.fixture(scope="session")
def nano() -> Path:
    """Return the small trained checkpoint that ships with the package."""
    return NANO


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Return the tiny checkpoint of the golden tensors."""
    return DATA / "oracle" / "ckpt_k3"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the malformed checkpoints once and return their folder."""
    folder = tmp_path_factory.mktemp("cases")
    script = DATA / "gen_cases.py"
    subprocess.run([sys.executable, script, "--out", folder], check=True, capture_output=True)
    return folder


@pytest.fixture
def base(cases: Path, tmp_path: Path) -> Path:
    """Return a writable copy of the healthy three-shard checkpoint."""
    return Path(shutil.copytree(cases / "base", tmp_path / "base"))


@pytest.fixture(scope="session")
def k3_config() -> dict[str, object]:
    """Return the released config.json."""
    path = Path(__file__).parent.parent / "manifests" / "kimi-k3.config.json"
    config: dict[str, object] = json.loads(path.read_text())
    return config
