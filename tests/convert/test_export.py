"""Every export of the small checkpoints: right names and bytes, exact where its proof says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import Recipe, built_in_recipes, load_recipe, parse_recipe, recipe_for
from k3quant.convert.run import ConvertResult, ConvertSettings, run_convert
from k3quant.errors import IncompleteError, RefusedError, ResourceError, SchemaError, UsageError
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.mxfp4 import dequantize_mxfp4
from k3quant.schemes.ct_match import read_matcher
from k3quant.schemes.decode import decode_matrix
from k3quant.schemes.storage import storage_of
from k3quant.verify.run import VerifySettings, verify

EXACT = ["bf16", "mxfp4", "mxfp8", "nvfp4", "fp8-block", "fp8-channel"]
LOSSY = ["int8", "int4"]
ALWAYS = ["bf16", "mxfp4", "mxfp8"]


def recipe(target: str, scheme: str = "compressed-tensors") -> Recipe:
    return recipe_for(target, scheme=scheme, rounding=ScaleRounding.EVEN, group_size=32)


def export(
    source: Path, out: Path, rules: Recipe, *, allow_skip: tuple[str, ...] = (), **settings: Any
) -> ConvertResult:
    checkpoint = open_checkpoint(source)
    plan = plan_export(checkpoint, rules, allow_skip=allow_skip)
    parameters = {"rules": repr(rules)}
    return run_convert(checkpoint, out, plan, ConvertSettings(parameters=parameters, **settings))


def stored(checkpoint: Checkpoint, module: str) -> dict[str, torch.Tensor]:
    parts = {}
    for name, entry in checkpoint.entries.items():
        if name.rpartition(".")[0] == module:
            raw = torch.from_numpy(checkpoint.read(name))
            kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32,
                     "I64": torch.int64, "I8": torch.int8}  # fmt: skip
            parts[name.rpartition(".")[2]] = raw.view(kinds.get(entry.dtype, torch.uint8)).reshape(
                entry.shape
            )
    return parts


def decoded(checkpoint: Checkpoint, module: str, shape: tuple[int, int]) -> torch.Tensor:
    parts = stored(checkpoint, module)
    if parts.keys() == {"weight"} and parts["weight"].dtype is torch.bfloat16:
        return parts["weight"].float()
    kinds = {
        n.rpartition(".")[2]: (e.dtype, e.shape)
        for n, e in checkpoint.entries.items()
        if n.rpartition(".")[0] == module
    }
    storage = storage_of(kinds, *shape)
    assert storage is not None
    return decode_matrix(storage.name, parts, shape)


def expert_modules(checkpoint: Checkpoint) -> list[str]:
    ends = ".weight_packed"
    return [n.removesuffix(ends) for n in checkpoint.entries if n.endswith(ends)]


MODELOPT = ["nvfp4", "fp8-block", "mxfp8"]


@pytest.mark.parametrize(
    ("scheme", "target"),
    [("compressed-tensors", target) for target in [*EXACT, *LOSSY]]
    + [("modelopt", target) for target in MODELOPT],
)
@pytest.mark.parametrize("which", ["nano", "oracle"])
def test_export_verifies_and_decodes_to_what_its_proof_says(
    which: str, tmp_path: Path, target: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    result = export(folder, tmp_path / "out", recipe(target, scheme))
    report = verify(LocalFolder(tmp_path / "out"), VerifySettings())
    assert report.exit_code == 0, [f.message for f in report.findings]
    assert report.summary["manifest"] == "k3quant.proof.json"
    proof = json.loads((tmp_path / "out" / "k3quant.proof.json").read_text())["weights"]
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "out")
    # The oracle has one group 2^-120 times its neighbours, which a two-level scale cannot reach.
    inexact = [m for m, record in proof.items() if not record["exact"]]
    if target in EXACT and not (which == "oracle" and target not in ALWAYS):
        assert inexact == []
    assert result.exact == (not inexact)
    for module in {*expert_modules(before)[::29], *inexact[:5]}:
        parts = stored(before, module)
        shape = (parts["weight_packed"].shape[0], parts["weight_packed"].shape[1] * 2)
        source = dequantize_mxfp4(
            parts["weight_packed"], parts["weight_scale"], dtype=torch.float32
        )
        got = decoded(after, module, shape)
        assert torch.equal(source, got) == proof[module]["exact"], module
        assert float((source - got).abs().max()) <= float(source.abs().max()) / 7


@pytest.mark.parametrize("target", ["bf16", "nvfp4", "int4"])
def test_everything_else_keeps_its_bytes(oracle: Path, tmp_path: Path, target: str) -> None:
    export(oracle, tmp_path / "out", recipe(target))
    before, after = open_checkpoint(oracle), open_checkpoint(tmp_path / "out")
    kept = [name for name in before.entries if ".experts." not in name]
    assert any(name.endswith("A_log") for name in kept)
    for name in kept:
        assert before.entries[name].dtype == after.entries[name].dtype
        assert before.read(name).tobytes() == after.read(name).tobytes(), name
    assert (tmp_path / "out" / "tiktoken.model").read_bytes() == (
        oracle / "tiktoken.model"
    ).read_bytes()


@pytest.mark.parametrize("name", built_in_recipes())
def test_built_in_recipe_runs_and_verifies(nano: Path, tmp_path: Path, name: str) -> None:
    export(nano, tmp_path / "out", load_recipe(name))
    report = verify(LocalFolder(tmp_path / "out"), VerifySettings())
    assert report.exit_code == 0, [f.message for f in report.findings]


@pytest.mark.parametrize("target", ["nvfp4", "mxfp8", "int8", "fp8-channel"])
def test_config_targets_exactly_what_is_quantized(
    oracle: Path, tmp_path: Path, target: str
) -> None:
    export(oracle, tmp_path / "out", recipe(target))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    matcher = read_matcher(config["quantization_config"])
    after = open_checkpoint(tmp_path / "out")
    ends = ".weight_scale"
    quantized = {n.removesuffix(ends) for n in after.entries if n.endswith(ends)}
    plain = {n.removesuffix(".weight") for n in after.entries if n.endswith(".weight")} - quantized
    assert quantized
    for module in quantized:
        assert matcher.targets_linear(module), module
    for module in plain:
        assert not matcher.targets_linear(module), module


def test_w1_and_w3_share_their_tensor_scale_even_across_shards(cases: Path, tmp_path: Path) -> None:
    together = tmp_path / "together"
    export(cases / "base", together, recipe("nvfp4"))
    apart = tmp_path / "apart"
    shutil.copytree(cases / "base", apart)
    _move_w3(apart)
    export(apart, tmp_path / "moved", recipe("nvfp4"))
    one, two = open_checkpoint(together), open_checkpoint(tmp_path / "moved")
    assert one.entries.keys() == two.entries.keys()
    for name in one.entries:
        assert one.read(name).tobytes() == two.read(name).tobytes(), name
    w1 = [n for n in one.entries if n.endswith("w1.weight_global_scale")]
    assert len(w1) == 8
    for name in w1:
        assert one.read(name).tobytes() == one.read(name.replace("w1", "w3")).tobytes()


def _move_w3(folder: Path) -> None:
    """Move every w3 of shard 2 to shard 3."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = [folder / f"model-0000{n}-of-000003.safetensors" for n in (2, 3)]
    tensors = []
    for file in files:
        with safe_open(file, "pt") as reader:
            tensors.append({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    moved = [name for name in tensors[0] if ".w3." in name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in moved:
        tensors[1][name] = tensors[0].pop(name)
        index["weight_map"][name] = files[1].name
    for file, content in zip(files, tensors, strict=True):
        save_file(content, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "SHA256SUMS").unlink()


def test_negative_zero_codes_survive(nano: Path, tmp_path: Path) -> None:
    export(nano, tmp_path / "out", recipe("nvfp4"))
    before, after = open_checkpoint(nano), open_checkpoint(tmp_path / "out")
    names = [name for name in before.entries if name.endswith("weight_packed")]
    kept = sum(before.read(n).tobytes() == after.read(n).tobytes() for n in names)
    assert kept == len(names)
    assert any(0x88 in before.read(n) for n in names)


def test_unknown_tensor_is_refused_unless_named(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"extra\.(empty|scalar|mask)"):
        export(cases / "R10", tmp_path / "out", recipe("bf16"))
    export(cases / "R10", tmp_path / "out", recipe("bf16"), allow_skip=(r"extra\..*",))
    proof = json.loads((tmp_path / "out" / "k3quant.proof.json").read_text())
    assert sorted(proof["skipped"]) == ["extra.empty", "extra.mask", "extra.scalar"]


def test_lossless_is_required_before_a_lossy_file_appears(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="lossless int4"):
        export(nano, tmp_path / "out", recipe("int4"), require_lossless=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "config.json" not in names
    assert not {n for n in names if n.endswith(".partial")}
    experts = [
        n for n in names if n.startswith("model-0000") and n != "model-00001-of-000012.safetensors"
    ]
    assert all(n[6:11] >= "00010" for n in experts)  # only files without experts may be there


def test_nan_scale_stops_the_run_naming_the_matrix(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"layers\.2.*experts\.3\.w2.*row 2") as caught:
        export(cases / "V19", tmp_path / "out", recipe("bf16"))
    assert caught.value.exit_code == 7  # type: ignore[attr-defined]


def test_fp8_typed_scales_convert_to_the_same_bytes(cases: Path, tmp_path: Path) -> None:
    export(cases / "base", tmp_path / "a", recipe("bf16"))
    export(cases / "V28", tmp_path / "b", recipe("bf16"))
    one, two = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    experts = [n for n in one.entries if ".experts." in n]
    assert experts
    assert all(one.read(n).tobytes() == two.read(n).tobytes() for n in experts)


def test_zero_expert_stays_zero_everywhere(cases: Path, tmp_path: Path) -> None:
    module = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    for target in [*EXACT, *LOSSY]:
        export(cases / "C10", tmp_path / target, recipe(target))
        after = open_checkpoint(tmp_path / target)
        assert not decoded(after, module, (64, 64)).any(), target


def test_other_parameters_and_full_folders_are_refused(nano: Path, tmp_path: Path) -> None:
    export(nano, tmp_path / "out", recipe("bf16"))
    with pytest.raises(RefusedError, match="parameters it was started with"):
        export(nano, tmp_path / "out", recipe("nvfp4"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(RefusedError, match="empty output folder"):
        export(nano, tmp_path / "full", recipe("bf16"))
    copy = Path(shutil.copytree(nano, tmp_path / "copy"))
    with pytest.raises(RefusedError, match="outside the source"):
        export(copy, copy / "inside", recipe("bf16"))


def test_second_run_writes_nothing_again(nano: Path, tmp_path: Path) -> None:
    first = export(nano, tmp_path / "out", recipe("nvfp4"))
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
    second = export(nano, tmp_path / "out", recipe("nvfp4"))
    assert (first.resumed, second.resumed) == (0, 12)
    assert first.summary == second.summary
    assert stamps == {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")
    }


def test_source_shard_that_cannot_be_hashed_stops_the_run(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalFolder.read_into

    def fail_at_the_start(self: LocalFolder, file: str, offset: int, buffer: memoryview) -> None:
        # Tensors lie behind the header: only a whole read begins here.
        if offset == 0 and file == "model-00003-of-000012.safetensors":
            raise ResourceError(f"{file}: expected to read it, got input/output error")
        read(self, file, offset, buffer)

    monkeypatch.setattr(LocalFolder, "read_into", fail_at_the_start)
    with pytest.raises(ResourceError, match=r"model-00003.*input/output error"):
        export(nano, tmp_path / "out", recipe("nvfp4"))
    assert not (tmp_path / "out" / "k3quant.proof.json").exists()
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_missing_tensor_is_named(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"experts\.0\.w1\.weight_scale"):
        export(cases / "V17", tmp_path / "out", recipe("bf16"))
    with pytest.raises(IncompleteError):
        export(cases / "V12", tmp_path / "out", recipe("bf16"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("x = [", "TOML", id="no-toml"),
        pytest.param("", "at least one", id="no-rule"),
        pytest.param('[[rule]]\nformat="bf17"', "bf17", id="unknown-format"),
        pytest.param('[[rule]]\nformat="bf16"\nx=1', "x", id="unknown-key"),
        pytest.param('[[rule]]\nfamilies=["xx"]\nformat="bf16"', "xx", id="unknown-family"),
        pytest.param('[[rule]]\npattern="("\nformat="bf16"', "known values", id="bad-pattern"),
    ],
)
def test_malformed_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        parse_recipe(text, "r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            '[[rule]]\nfamilies=["routed experts"]\nformat="bf16"\n'
            '[[rule]]\nroles=["expert.w1"]\nformat="nvfp4"',
            "rules 1 and 2",
            id="two-rules-for-one-weight",
        ),
        pytest.param(
            '[[rule]]\nlayers="400-500"\nformat="bf16"', "rule 1 to match a weight", id="no-match"
        ),
        pytest.param(
            '[[rule]]\nroles=["kda.b_proj"]\nformat="fp8-block"', "whole tiles", id="ragged-tiles"
        ),
    ],
)
def test_recipe_that_does_not_fit_is_refused(
    nano: Path, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        export(nano, tmp_path / "out", parse_recipe(text, "r"))


def test_scheme_that_cannot_spell_a_format_is_refused(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="modelopt"):
        export(nano, tmp_path / "out", recipe("int4", "modelopt"))
