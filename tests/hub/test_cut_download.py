"""Layers and experts fetched as a cut: what `repack` would make of the whole, by ranges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import ExitCode, IncompleteError, RefusedError, ResourceError, UsageError
from k3quant.hub.folder_check import check_offline
from k3quant.hub.record import RECORD_FILE
from k3quant.hub.settings import DownloadSettings
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings
from k3quant.report import Report

Run = Callable[..., Report]

CHECKPOINT = Path(__file__).parents[1] / "data" / "oracle" / "ckpt_k3"
OURS = {RECORD_FILE, ".k3quant-journal.jsonl", "k3quant.cut.json"}


@pytest.fixture(autouse=True)
def whole(hub_server: Any, repo: Any) -> dict[str, bytes]:
    files = {name: path.read_bytes() for name, path in hub_server.folder_files(CHECKPOINT).items()}
    repo.commit(files)
    return files


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in OURS
    }


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({"layers": (0, 3)}, id="first-layers"),
        pytest.param({"layers": (4, 7)}, id="later-layers"),
        pytest.param({"experts": (2, 5)}, id="experts"),
        pytest.param({"layers": (0, 3), "experts": (0, 1)}, id="both"),
    ],
)
@pytest.mark.parametrize("redirect", [None, "other"])
def test_cut_equals_that_of_the_whole(
    hub: Any, download: Run, out: Path, tmp_path: Path, cut: dict[str, Any], redirect: str | None
) -> None:
    hub.redirect = redirect
    report = download(**cut)
    assert report.ok
    assert report.summary["state"] == "subset"
    run_repack(CHECKPOINT, tmp_path / "repacked", RepackSettings(**cut))
    assert contents(out) == contents(tmp_path / "repacked")
    assert open_checkpoint(out).entries


def test_only_the_needed_ranges_are_fetched(hub: Any, download: Run, out: Path) -> None:
    download(layers=(4, 7), experts=(0, 0), jobs=1)  # several would help each other
    payload = sum(p.stat().st_size for p in out.glob("*.safetensors"))
    asked = hub.sent("safetensors")
    headers = sum(
        int.from_bytes((CHECKPOINT / f).read_bytes()[:8], "little") + 8
        for f in {seen.path.rpartition("/")[2] for seen in hub.files_asked()}
        if f.endswith(".safetensors")
    )
    # A header comes with the first megabyte of its file, which here is all of a file.
    first_reads = sum(
        s.sent for s in hub.files_asked() if s.range and s.range.startswith("bytes=0-")
    )
    assert headers < first_reads
    assert asked - first_reads <= payload
    assert not hub.sent("model-00001-of-000012.safetensors")


def test_whole_layers_are_proved_by_their_shards_digests(
    hub: Any, download: Run, out: Path
) -> None:
    download(layers=(4, 7))
    fetched = json.loads((out / RECORD_FILE).read_text())["fetched"]
    assert {e["proof"] for n, e in fetched.items() if n.endswith(".safetensors")} <= {
        "source", "sha256",
    }  # fmt: skip


@pytest.mark.parametrize("times", [1, 1000])
def test_flipped_bit_in_a_whole_layer_is_found(
    hub: Any, download: Run, out: Path, times: int, whole: dict[str, bytes]
) -> None:
    shard = "model-00005-of-000012.safetensors"
    hub.fault(f"{shard}$", after=1, times=times, flip_at=len(whole[shard]) - 100)
    report = download(layers=(4, 7), jobs=1)
    assert report.exit_code is (ExitCode.GOOD if times == 1 else ExitCode.HASH)


def test_cut_is_resumed(hub: Any, download: Run, out: Path, tmp_path: Path) -> None:
    hub.fault("model-00007-of", after=1, times=1000, status=503)
    with pytest.raises(ResourceError) as caught:
        download(layers=(4, 7), piece_bytes=4096)
    assert "--layers 4-7" in caught.value.hint
    hub.faults.clear()
    report = download(layers=(4, 7), piece_bytes=4096)
    assert report.ok
    run_repack(CHECKPOINT, tmp_path / "repacked", RepackSettings(layers=(4, 7)))
    assert contents(out) == contents(tmp_path / "repacked")


def test_second_run_fetches_nothing_but_headers(hub: Any, download: Run) -> None:
    download(layers=(4, 7))
    report = download(layers=(4, 7))
    assert report.ok
    assert report.summary["fetched_files"] == 0


def test_cut_and_whole_do_not_mix(hub: Any, download: Run) -> None:
    download(layers=(4, 7))
    with pytest.raises(
        RefusedError, match=r"expected a folder of the whole model, got one of layers 4-7"
    ):
        download()


def test_offline_check_of_a_cut(
    hub: Any, download: Run, out: Path, settings: DownloadSettings
) -> None:
    from dataclasses import replace

    download(layers=(4, 7))
    wanted = replace(settings, layers=(4, 7), verify_only=True)
    assert check_offline(out, wanted).summary["state"] == "subset"
    with pytest.raises(IncompleteError, match=r"got a subset \(layers 4-7"):
        check_offline(out, settings)
    shard = sorted(out.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert check_offline(out, wanted).exit_code is ExitCode.HASH


def test_layers_beyond_the_model(hub: Any, download: Run, out: Path) -> None:
    with pytest.raises(UsageError, match="layers: expected a range within"):
        download(layers=(5, 99))
    assert not out.exists()


def test_cut_with_patterns_is_refused() -> None:
    with pytest.raises(UsageError, match="got both"):
        DownloadSettings(layers=(0, 1), include=("tokenizer",))
