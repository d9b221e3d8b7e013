"""Small checkpoints to repack, and what must survive."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.synth.run import synth

Digests = dict[str, tuple[str, tuple[int, ...], str]]


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], Digests]:
    """Return a function that gives dtype, shape and sha256 of every tensor of a folder."""

    def of(folder: Path) -> Digests:
        checkpoint = open_checkpoint(folder)
        return {
            name: (e.dtype, e.shape, hashlib.sha256(checkpoint.read(name).tobytes()).hexdigest())
            for name, e in checkpoint.entries.items()
        }

    return of


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    """Return a function that reads every file of a folder but the journal."""

    def of(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".k3quant-journal.jsonl"
        }

    return of


@pytest.fixture(scope="session")
def tiny_config(nano: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a small config of given layers, experts and widths."""
    released = json.loads((nano / "config.json").read_text())

    def make(
        *,
        kinds: str = "KKKM",
        experts: int = 5,
        hidden: int = 32,
        block: int | None = 3,
        dense: int = 1,
        vision: bool = False,
        packed: bool = True,
    ) -> dict[str, Any]:
        config = copy.deepcopy(released)
        text = config["text_config"]
        numbered = list(enumerate(kinds, start=1))
        text |= {
            "num_hidden_layers": len(kinds),
            "hidden_size": hidden,
            "intermediate_size": 32,
            "vocab_size": 2304,
            "attn_res_block_size": block,
            "first_k_dense_replace": dense,
            "num_experts": experts,
            "num_experts_per_token": min(3, experts),
            "routed_expert_hidden_size": 32,
            "moe_intermediate_size": 32,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        text["linear_attn_config"] |= {
            "num_heads": 2,
            "head_dim": 4,
            "kda_layers": [number for number, kind in numbered if kind == "K"],
            "full_attn_layers": [number for number, kind in numbered if kind == "M"],
        }
        if not packed:
            del text["quantization_config"]
        if vision:
            config["vision_config"] |= {"vt_num_hidden_layers": 2, "text_hidden_size": hidden}
        else:
            del config["vision_config"]
        return config

    return make


@pytest.fixture(scope="session")
def tiny_source(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., dict[str, Any]]
) -> Path:
    """Write a small checkpoint once: four layers, five experts, vision. Not to be changed."""
    folder = tmp_path_factory.mktemp("tiny") / "source"
    synth(tiny_config(vision=True), folder, sparse=False, seed=1)
    (folder / ".k3quant-journal.jsonl").unlink()
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    """Return a writable copy of the small checkpoint."""
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))
