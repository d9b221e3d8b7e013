"""Read our exports with compressed-tensors itself: config, targets, formats, and every value.

    python compressed_tensors_check.py [--results benchmarks/results/consumers.json]

The bundled nano checkpoint is exported to every format and by every recipe; compressed-tensors
parses the config, matches it against a model of empty Linear modules with the checkpoint's names,
and decompresses every quantized module. Its values must equal ours, its matches the modules that
are stored quantized. Needs k3quant and `compressed-tensors` 0.20 or later.
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_named_modules

from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import Recipe, built_in_recipes, load_recipe, recipe_for
from k3quant.convert.run import ConvertSettings, run_convert
from k3quant.formats.dtypes import torch_dtype
from k3quant.formats.mx import ScaleRounding
from k3quant.schemes.decode import decode_matrix
from k3quant.schemes.storage import storage_of

NANO = Path(__file__).resolve().parents[2] / "k3quant" / "nano"
TARGETS = ("mxfp4", "mxfp8", "nvfp4", "fp8-block", "fp8-channel", "int8", "int4")
THEIRS = {"F8_E4M3": torch.float8_e4m3fn}  # ours stay bytes

Parts = dict[str, torch.Tensor]


def recipes() -> dict[str, Recipe]:
    plain = {
        target: recipe_for(
            target, scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
        )
        for target in TARGETS
    }
    return plain | {name: load_recipe(name) for name in built_in_recipes()}


def model_of(modules: set[str]) -> torch.nn.Module:
    """Return a module tree in which every name is an empty Linear."""
    root = torch.nn.Module()
    for name in sorted(modules):
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, torch.nn.Linear(1, 1, bias=False, device="meta"))
    return root


def parts_of(checkpoint: Checkpoint, module: str) -> tuple[Parts, Parts, dict[str, Any]]:
    """Return a module's tensors as their reader and as ours take them, and their kinds."""
    theirs: Parts = {}
    ours: Parts = {}
    kinds: dict[str, Any] = {}
    for name, entry in checkpoint.entries.items():
        if name.rpartition(".")[0] != module:
            continue
        part = name.rpartition(".")[2]
        raw = torch.from_numpy(checkpoint.read(name))
        wide = raw.view(THEIRS.get(entry.dtype) or torch_dtype(entry.dtype)).reshape(entry.shape)
        theirs[part] = wide
        ours[part] = raw.reshape(entry.shape) if entry.dtype == "F8_E4M3" else wide
        kinds[part] = (entry.dtype, entry.shape)
    return theirs, ours, kinds


def check(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    section = json.loads((folder / "config.json").read_text())
    config = QuantizationConfig.model_validate(section["quantization_config"])
    quantized = {
        n.rpartition(".")[0] for n in checkpoint.entries if n.rpartition(".")[2] == "weight_scale"
    }
    linear = {
        n.removesuffix(".weight")
        for n, entry in checkpoint.entries.items()
        if n.endswith(".weight") and len(entry.shape) == 2
    }
    model = model_of(quantized | linear)
    matched: dict[str, Any] = {}
    for scheme in config.config_groups.values():
        for name, _ in match_named_modules(model, scheme.targets, config.ignore):
            if name in matched:
                raise SystemExit(f"{name}: expected one group to match it, got two")
            matched[name] = scheme
    if matched.keys() != quantized:
        apart = sorted(matched.keys() ^ quantized)
        raise SystemExit(f"targets: expected what is stored quantized, got {apart[:3]} apart")
    largest = 0.0
    formats: dict[str, int] = {}
    for module, scheme in matched.items():
        theirs, ours, kinds = parts_of(checkpoint, module)
        name = str(getattr(scheme.format or config.format, "value", scheme.format or config.format))
        inferred = infer_module_format(torch.nn.Linear, scheme).value
        if name != inferred:
            raise SystemExit(f"{module}: expected format {inferred}, got {name}")
        formats[name] = formats.get(name, 0) + 1
        weight = BaseCompressor.get_value_from_registry(name).decompress(theirs, scheme)["weight"]
        storage = storage_of(kinds, *weight.shape)
        assert storage is not None, module
        value = decode_matrix(storage.name, ours, tuple(weight.shape))
        largest = max(largest, float((weight.float() - value.to(weight.dtype).float()).abs().max()))
    return {
        "linear_modules": len(quantized | linear),
        "matched": len(matched),
        "formats": formats,
        "largest_difference": largest,
        "good": largest == 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JSON file that keeps the record")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name, recipe in recipes().items():
        if recipe.scheme != "compressed-tensors":
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = open_checkpoint(NANO)
            plan = plan_export(source, recipe, allow_skip=())
            run_convert(source, Path(folder), plan, ConvertSettings(parameters={"name": name}))
            found[name] = check(Path(folder))
        print(name, json.dumps(found[name]))
    record = {
        "consumer": "compressed-tensors",
        "version": version("compressed-tensors"),
        "exports": found,
        "good": all(f["good"] for f in found.values()),
    }
    if args.results is not None:
        known = json.loads(args.results.read_text()) if args.results.exists() else {}
        kept = dict(sorted((known | {"compressed-tensors": record}).items()))
        args.results.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if record["good"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
