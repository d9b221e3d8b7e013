import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3quant.checkpoint.header import encode_header
from k3quant.checkpoint.index import INDEX_FILE, encode_index
from k3quant.hub.download import run_download
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
from k3quant.report import Report

SHARD_BYTES = 300_000
REPO = "test/repo"


def _load_server() -> ModuleType:
    # Not on the path: test folders are no packages.
    path = Path(__file__).with_name("server.py")
    spec = importlib.util.spec_from_file_location("k3quant_test_hub_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_SERVER = _load_server()


@pytest.fixture(scope="session")
def hub_server() -> ModuleType:
    return _SERVER


def _shard(name: str, size: int) -> bytes:
    header, _ = encode_header([(name, "U8", (size,))])
    pattern = bytes((i * 7 + ord(name[-1])) % 251 for i in range(4099))
    return header + (pattern * (size // len(pattern) + 1))[:size]


def toy_files(shard_bytes: int = SHARD_BYTES) -> dict[str, bytes]:
    """A repository of three shards, their index, sidecars, a folder and stray weights."""
    shards = {
        f"model-{n:05d}-of-000003.safetensors": _shard(f"t{n}", shard_bytes + n) for n in (1, 2, 3)
    }
    weight_map = {f"t{n}": file for n, file in enumerate(shards, start=1)}
    return {
        "config.json": json.dumps({"model_type": "toy"}).encode(),
        "tiktoken.model": b"ranks " * 200,
        "tokenizer_config.json": b"{}",
        "README.md": b"# toy\n",
        "assets/logo.png": b"\x89PNG" * 50,
        "empty.txt": b"",
        INDEX_FILE: encode_index(weight_map, 3 * shard_bytes + 6),
        **shards,
        "copy/model-00001-of-000003.safetensors": b"x" * 5000,
        "consolidated.00.pth": b"y" * 5000,
    }


STRAYS = {"copy/model-00001-of-000003.safetensors", "consolidated.00.pth"}
SHARDS = [f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3)]


@pytest.fixture(scope="session")
def toy() -> Callable[[int], dict[str, bytes]]:
    """Make files of the toy repository with shards of another size."""
    return toy_files


@pytest.fixture(scope="session")
def files() -> dict[str, bytes]:
    return toy_files()


@pytest.fixture
def repo(files: dict[str, bytes]) -> Any:
    return _SERVER.Repo(REPO, files)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")


@pytest.fixture
def hub(repo: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = _SERVER.HubServer(repo)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def settings() -> DownloadSettings:
    """Small pieces and short waits."""
    return DownloadSettings(jobs=4, piece_bytes=64 << 10, stall_timeout=1.0, retry_wait=0.01)


Run = Callable[..., Report]


@pytest.fixture
def download(hub: Any, tmp_path: Path, settings: DownloadSettings) -> Run:
    """Run a download of the toy repository into `tmp_path / "out"`."""

    def run(revision: str = "main", **changes: Any) -> Report:
        from dataclasses import replace

        extra = {key: changes.pop(key) for key in ("free", "progress") if key in changes}
        return run_download(
            parse_reference(f"{REPO}@{revision}"),
            tmp_path / "out",
            replace(settings, **changes),
            **extra,
        )

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def lay_out(out: Path, files: dict[str, bytes]) -> Callable[..., None]:
    """Write files of the toy repository into the output folder, as another tool would."""

    def write(*names: str) -> None:
        for name in names:
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])

    return write
