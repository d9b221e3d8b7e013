from pathlib import Path

import numpy as np
import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import IncompleteError, ResourceError, SchemaError, StructureError

NORM = "language_model.model.norm.weight"
SHARD_2 = "model-00002-of-000003.safetensors"


def test_tensor_bytes_are_the_format_readers_own(nano: Path) -> None:
    from safetensors import safe_open

    checkpoint = open_checkpoint(nano)
    with safe_open(nano / "model-00002-of-000012.safetensors", "pt") as reader:
        for name in list(reader.keys())[:40]:
            theirs = reader.get_tensor(name).contiguous().flatten()
            ours = checkpoint.read(name)
            assert ours.tobytes() == theirs.view(dtype=__import__("torch").uint8).numpy().tobytes()


def test_part_of_a_tensor_is_read_at_its_offset(nano: Path) -> None:
    checkpoint = open_checkpoint(nano)
    part = np.empty(10, np.uint8)
    checkpoint.read_into(NORM, part, offset=6)
    assert (part == checkpoint.read(NORM)[6:16]).all()
    with pytest.raises(ValueError, match="within"):
        checkpoint.read_into(NORM, part, offset=checkpoint.entry(NORM).length - 9)


def test_unknown_tensor_is_refused_by_name(nano: Path) -> None:
    with pytest.raises(SchemaError, match="expected tensor nothing"):
        open_checkpoint(nano).read("nothing")


def test_file_that_shrinks_after_opening_gives_an_error_not_a_signal(base: Path) -> None:
    checkpoint = open_checkpoint(base)
    name = next(n for n, e in checkpoint.entries.items() if e.file == SHARD_2 and e.length > 1000)
    with (base / SHARD_2).open("r+b") as file:
        file.truncate(checkpoint.entry(name).offset + 10)
    with pytest.raises(IncompleteError, match=r"expected \d+ bytes at offset \d+, got 10.*" + name):
        checkpoint.read(name)


def test_file_that_disappears_gives_an_error(base: Path) -> None:
    checkpoint = open_checkpoint(base)
    (base / SHARD_2).unlink()
    name = next(n for n, e in checkpoint.entries.items() if e.file == SHARD_2)
    with pytest.raises(IncompleteError, match="expected a file, got none"):
        checkpoint.read(name)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("V12", IncompleteError, "52 tensors"),
        ("D01", IncompleteError, "LFS pointer"),
        ("V01", IncompleteError, "short by 1000"),
        ("V11", StructureError, "the index says"),
        ("V13", StructureError, "0 of 30 named files"),
        ("V15", StructureError, "total_size"),
        ("V29", ResourceError, "not a regular file"),
    ],
)
def test_opening_raises_the_first_fault(
    cases: Path, case: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(cases / case)


def test_folder_without_shards_or_config_is_incomplete(tmp_path: Path, base: Path) -> None:
    with pytest.raises(IncompleteError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (base / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteError, match="index missing"):
        open_checkpoint(base)


def test_place_that_is_no_folder_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="got nothing"):
        LocalFolder(tmp_path / "absent")
