"""Fixtures of exports: a plan run by the engine, tensors read back without the code under test."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import Checkpoint, TensorEntry, open_checkpoint
from k3quant.convert.export_plan import ExportPlan
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.formats.dtypes import DTYPES
from k3quant.models.k3_config import read_config
from k3quant.models.k3_tensors import tensors

_NUMPY = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8, "U32": np.uint32}


@pytest.fixture(scope="session")
def export() -> Callable[[Path, ExportPlan, Path], dict[str, Any]]:
    """Return a function that runs a plan and returns the proof."""

    def run(source: Path, plan: ExportPlan, out: Path) -> dict[str, Any]:
        settings = ConvertSettings(parameters={"test": True}, hash_source=False, jobs=1)
        run_convert(open_checkpoint(source), out, plan, settings)
        proof: dict[str, Any] = json.loads((out / "k3quant.proof.json").read_text())
        return proof

    return run


@pytest.fixture(scope="session")
def read_tensors() -> Callable[[Path], dict[str, np.ndarray]]:
    """Return a reader of all safetensors of a folder; BF16 comes as its 16-bit patterns."""

    def read(folder: Path) -> dict[str, np.ndarray]:
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            data = file.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    begin, end = (start + offset for offset in entry["data_offsets"])
                    raw = np.frombuffer(data[begin:end], _NUMPY[entry["dtype"]])
                    tensors[name] = raw.reshape(entry["shape"])
        return tensors

    return read


@pytest.fixture(scope="session")
def released_checkpoint(nano: Path) -> Checkpoint:
    """Return the release as its table has it, without data, beside the small vocabulary."""
    raw = json.loads((Path(__file__).parents[2] / "manifests" / "kimi-k3.config.json").read_text())
    entries = {
        spec.name: TensorEntry(
            spec.dtype, spec.shape, "f", 0, DTYPES[spec.dtype].byte_count(math.prod(spec.shape))
        )
        for spec in tensors(read_config(raw))
    }
    ids = {"bos_token_id": 2048, "eos_token_id": 2050, "pad_token_id": 2303}
    config = raw | ids | {"text_config": raw["text_config"] | ids}
    return Checkpoint(
        source=LocalFolder(nano), config=config, index=None, headers={}, entries=entries
    )


@pytest.fixture
def writable_nano(nano: Path, tmp_path: Path) -> Path:
    """Return a writable copy of the small trained checkpoint."""
    return Path(shutil.copytree(nano, tmp_path / "nano"))


@pytest.fixture(scope="session")
def rewrite() -> Callable[..., None]:
    """Return a function that changes tensors of a checkpoint's shards in place.

    It takes the folder and a function from name and tensor to the new dtype and array, or None to
    drop the tensor; and further tensors for the last shard.
    """

    def change(
        folder: Path,
        edit: Callable[[str, str, np.ndarray], tuple[str, np.ndarray] | None],
        extra: dict[str, tuple[str, np.ndarray]] | None = None,
    ) -> None:
        weight_map, total = {}, 0
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            data = file.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            header, body = {}, b""
            tensors = dict(extra or {}) if file == files[-1] else {}
            for name, entry in json.loads(data[8:start]).items():
                if name == "__metadata__":
                    continue
                begin, end = (start + offset for offset in entry["data_offsets"])
                raw = np.frombuffer(data[begin:end], _NUMPY[entry["dtype"]])
                result = edit(name, entry["dtype"], raw.reshape(entry["shape"]))
                if result is not None:
                    tensors[name] = result
            for name, (dtype, array) in sorted(tensors.items(), key=lambda t: -t[1][1].itemsize):
                header[name] = {
                    "dtype": dtype,
                    "shape": list(array.shape),
                    "data_offsets": [len(body), len(body) + array.nbytes],
                }
                body += array.tobytes()
                weight_map[name] = file.name
            total += len(body)
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change
