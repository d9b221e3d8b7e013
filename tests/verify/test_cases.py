"""Every public bug report that concerns `verify`, with the right exit class and message."""

import json
from pathlib import Path

import pytest

from k3quant.checkpoint.folder import LocalFolder
from k3quant.manifest import load_manifest
from k3quant.report import Report, Severity
from k3quant.verify.run import Level, VerifySettings, verify

# case, exit code, words of the first error
FAULTS = [
    ("D01", 3, ["model-00002-of-000003", "Git LFS pointer", "real size 16255643104"]),
    ("D01b", 4, ["model-00002-of-000003", "not safetensors", "<!DOCTYPE"]),
    ("D02", 5, ["model-00002-of-000003", "expected sha256", "got"]),
    ("D04", 3, ["1 of 3 files missing"]),
    ("V01", 3, ["model-00003", "short by 1000 bytes", "experts.3.w2.weight_packed"]),
    ("V01b", 3, ["model-00003", "header incomplete"]),
    ("V01c", 3, ["model-00003", "5 bytes"]),
    ("V01d", 3, ["model-00003", "empty file"]),
    ("V02", 4, ["64 bytes after the last tensor"]),
    ("V03", 4, ["overlap", "w1.weight_packed", "w3.weight_packed"]),
    ("V04", 4, ["hole of 16 bytes", "w2.weight_scale"]),
    ("V06", 4, ["9223372036854775807"]),
    ("V06b", 4, ["little-endian"]),
    ("V07", 4, ["F3_E1M1"]),
    ("V08", 4, ["metadata value of `step` must be a string"]),
    ("V09", 4, ["52 indexed tensors missing"]),
    ("V10", 4, ["expected 2112 bytes", "got a range of 2048"]),
    ("V10b", 4, ["bad shape", "-64"]),
    ("V10c", 4, ["overflows 64 bits"]),
    ("V11", 4, ["w1.weight_scale", "model-00003", "model-00002"]),
    ("V12", 3, ["model-00002", "missing", "52 tensors"]),
    ("V13", 4, ["0 of 30 named files", "3 unindexed files hold all 126 names"]),
    ("V14", 4, ["model.safetensors", "1 of 1 with other bytes", "norm.weight"]),
    ("V15", 4, ["392464", "408536", "16072"]),
    ("V15c", 4, ["../base/"]),
    ("V17", 6, ["experts.0.w1", "expected weight_scale"]),
    ("V19", 7, ["experts.3.w2.weight_scale", "1 NaN scales", "row 2, group 1"]),
    ("V21", 7, ["weight_scale", "row 1, group 0"]),
    ("V21b", 7, ["weight_scale", "negative", "row 1, group 0"]),
    ("V22", 6, ["weight_scale", "[64, 2]", "[64, 1]"]),
    ("V23", 7, ["weight_global_scale"]),
    ("V23b", 7, ["weight_global_scale"]),
    ("V24", 7, ["A_log", "index 9", "0.001"]),
    ("V25", 6, ["layer 2: missing experts [2]"]),
    ("V26", 6, ["shared_experts.down_proj", "ignored by config, packed in file"]),
    ("V29", 8, ["not a regular file"]),
    ("V30", 5, ["zero bytes in a run", "all-zero packed rows"]),
    ("V32", 7, ["input_layernorm", "1 NaN, 1 Inf"]),
    ("V34b", 4, ["UTF-8"]),
    ("C14", 6, ["expected weight_global_scale"]),
    ("C32", 6, ["gate_proj", "[128, 64]", "[200, 96]"]),
]
HEALTHY = ["base", "V15b", "V16", "V20", "V24b", "V28", "V33", "V34", "R10", "R11", "C10", "D10"]


def run(folder: Path, level: Level = Level.VALUES) -> Report:
    return verify(LocalFolder(folder), VerifySettings(level=level))


def errors(report: Report) -> list[str]:
    return [f.message for f in report.findings if f.severity is Severity.ERROR]


@pytest.mark.parametrize(("case", "code", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_fault_is_found_with_its_class_and_numbers(
    cases: Path, case: str, code: int, words: list[str]
) -> None:
    report = run(cases / case)
    assert int(report.exit_code) == code, errors(report)
    for word in words:
        assert word in errors(report)[0]


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_and_oddly_legal_checkpoints_pass(cases: Path, case: str) -> None:
    report = run(cases / case)
    assert report.exit_code == 0, errors(report)


@pytest.mark.parametrize("which", ["nano", "oracle"])
def test_trained_checkpoints_pass(which: str, request: pytest.FixtureRequest) -> None:
    report = run(request.getfixturevalue(which))
    assert report.exit_code == 0, errors(report)
    assert [f.code for f in report.findings] == ["released-ignore-list"]


def test_every_generated_case_is_in_a_list_above(cases: Path) -> None:
    generated = json.loads((cases / "manifest.json").read_text())
    assert generated.keys() == ({fault[0] for fault in FAULTS} | set(HEALTHY)) - {"base"}


def test_truncated_shard_is_found_without_reading_data(cases: Path) -> None:
    assert run(cases / "V01", Level.HEADERS).exit_code == 3


def test_unreadable_shard_does_not_accuse_its_tensors(cases: Path) -> None:
    assert len(errors(run(cases / "V12", Level.SCHEMA))) == 1


def test_zero_run_is_found_without_any_digest(cases: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(cases / "V30", tmp_path / "V30")
    (folder / "SHA256SUMS").unlink()
    report = run(folder)
    assert report.exit_code == 7
    assert "47 all-zero packed rows from row 17" in errors(report)[0]


def test_extra_copies_are_counted_as_a_warning(cases: Path) -> None:
    (finding,) = [f for f in run(cases / "D10").findings if f.severity is Severity.WARNING]
    assert "3 files (408536 bytes) not in index" in finding.message


def test_partial_download_is_named_with_its_size(cases: Path) -> None:
    assert any("1 partial file of 4096 bytes" in text for text in errors(run(cases / "D04")))


def test_sums_file_serves_as_a_manifest(cases: Path) -> None:
    manifest = load_manifest(cases / "base" / "SHA256SUMS")
    settings = VerifySettings(level=Level.HASH, manifest=manifest)
    assert verify(LocalFolder(cases / "base"), settings).exit_code == 0
    assert verify(LocalFolder(cases / "D02"), settings).exit_code == 5


def test_built_in_manifest_names_every_missing_shard(cases: Path) -> None:
    settings = VerifySettings(level=Level.HEADERS, manifest=load_manifest("kimi-k3"))
    report = verify(LocalFolder(cases / "base"), settings)
    assert report.exit_code == 3
    missing = [f for f in report.findings if f.code == "missing-file"]
    assert len([f for f in missing if f.subject.endswith(".safetensors")]) == 96


def test_findings_have_the_published_form(cases: Path) -> None:
    document = run(cases / "V19").to_json()
    assert document.keys() == {"command", "version", "ok", "exit_code", "findings", "summary"}
    for finding in document["findings"]:
        assert list(finding) == [
            "code", "class", "severity", "subject", "message", "expected", "got", "hint",
        ]  # fmt: skip
    json.dumps(document)
