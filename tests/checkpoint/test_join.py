"""What lies beside the files that an index names: unfinished downloads, and what only looks so."""

import pytest

from k3quant.checkpoint.folder import FileInfo
from k3quant.checkpoint.header import Header
from k3quant.checkpoint.index import Index
from k3quant.checkpoint.join import join_index
from k3quant.report import Finding, Severity

A, B = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
INDEX = Index(weight_map={"a": A, "b": B}, total_size=0)


def partials(*files: str) -> list[Finding]:
    headers = {
        file: Header(file=file, file_bytes=10, json_bytes=2, metadata={}, tensors={})
        for file in files
        if file in (A, B)
    }
    found = join_index(INDEX, {file: FileInfo(size=10) for file in files}, headers)
    return [finding for finding in found if finding.code == "partial-file"]


@pytest.mark.parametrize(
    "name",
    [f"{B}.partial", ".cache/huggingface/download/xyz.abc.incomplete"],
    ids=["ours", "of-another-client"],
)
def test_unfinished_shard_is_named_beside_the_missing_one(name: str) -> None:
    (finding,) = partials(A, name)
    assert finding.subject == name
    assert finding.severity is Severity.ERROR


def test_unfinished_shard_beside_a_whole_one_is_a_warning() -> None:
    (finding,) = partials(A, B, f"{B}.partial")
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "name",
    [
        "tiktoken.model.partial",
        f"{B}.partial.json",
        f".k3quant-source/{B}.partial",
        "model-00003-of-000002.safetensors.partial",
    ],
    ids=["sidecar", "state-of-a-partial-file", "source-of-a-conversion", "no-shard-of-the-index"],
)
def test_other_partial_files_are_no_part_of_the_checkpoint(name: str) -> None:
    assert partials(A, name) == []
