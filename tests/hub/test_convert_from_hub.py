"""A conversion that begins on the Hub ends in the bytes of one that begins in a folder."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.cli.main import app
from k3quant.convert.export_plan import ExportPlan
from k3quant.convert.from_hub import (
    SOURCE_FOLDER,
    convert_from_hub,
    open_from_hub,
    plan_from_hub,
)
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.convert.run import ConvertResult, ConvertSettings, run_convert
from k3quant.errors import HashError, K3QuantError, RefusedError, ResourceError
from k3quant.formats.mx import ScaleRounding
from k3quant.hub.download import run_download
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
from k3quant.schemes.gguf import plan_gguf
from k3quant.schemes.mlx import plan_mlx
from k3quant.verify.run import VerifySettings, verify

REPO = "test/k3"
KILLS = 10
HEADERS = 14  # requests before the first shard is asked for: config, index, and twelve headers
SIDECARS = {
    "assets/logo.png", "empty.txt", "eval.txt", "generation_config.json",
    "preprocessor_config.json", "tiktoken.model", "tokenizer_config.json",
}  # fmt: skip
Make = Callable[[Checkpoint], ExportPlan]


def to_nvfp4(checkpoint: Checkpoint) -> ExportPlan:
    rules = recipe_for(
        "nvfp4", scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
    )
    return plan_export(checkpoint, rules)


TARGETS = {
    "nvfp4": to_nvfp4,
    "gguf": lambda c: plan_gguf(c, max_file_bytes=1_500_000),
    "mlx": lambda c: plan_mlx(c, max_file_bytes=1_500_000),
}
CONVERT = ConvertSettings(parameters={"to": "it"}, jobs=2)


@pytest.fixture
def settings() -> DownloadSettings:
    return DownloadSettings(jobs=3, piece_bytes=64 << 10, stall_timeout=2.0, retry_wait=0.01)


@pytest.fixture(scope="session")
def model(nano: Path) -> dict[str, Any]:
    """The nano checkpoint, beside files that no conversion wants."""
    files: dict[str, Any] = {p.name: p for p in nano.iterdir() if p.is_file()}
    return {
        **files,
        "assets/logo.png": b"\x89PNG" * 500_000,  # larger than what is read at once
        "copy/model-00001-of-000012.safetensors": b"x" * 5000,
        "consolidated.00.pth": b"y" * 5000,
        "empty.txt": b"",
    }


@pytest.fixture
def hub(hub_server: Any, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = hub_server.HubServer(hub_server.Repo(REPO, model))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def convert(hub: Any, settings: DownloadSettings, out: Path) -> Callable[..., ConvertResult]:
    def run(make: Make = to_nvfp4, place: str = REPO, **extra: Any) -> ConvertResult:
        convert_settings = extra.pop("convert_settings", CONVERT)
        reference = parse_reference(place)
        source = open_from_hub(reference, out, replace(settings, **extra.pop("download", {})))
        try:
            return convert_from_hub(source, out, make(source.checkpoint), convert_settings, **extra)
        finally:
            source.client.close()

    return run


@pytest.fixture(scope="session")
def expected(
    hub_server: Any, model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """Download as a whole, then convert the folder."""
    work = tmp_path_factory.mktemp("whole")
    done: dict[str, dict[str, bytes]] = {}

    def run(target: str) -> dict[str, bytes]:
        if not done:
            server = hub_server.HubServer(hub_server.Repo(REPO, model))
            settings = DownloadSettings(endpoint=server.url)
            report = run_download(parse_reference(REPO), work / "source", settings)
            server.close()
            assert report.summary["state"] == "complete"
        if target not in done:
            checkpoint = open_checkpoint(work / "source")
            run_convert(checkpoint, work / target, TARGETS[target](checkpoint), CONVERT)
            done[target] = contents(work / target)
        return done[target]

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the journal; of the proof, all but what the job was asked."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".k3quant-journal.jsonl"
    }
    proof = json.loads(found["k3quant.proof.json"])
    proof["job"]["parameters"].pop("source", None)
    found["k3quant.proof.json"] = json.dumps(proof).encode()
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_export_equals_that_of_the_downloaded_folder(
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    hub: Any,
    out: Path,
    target: str,
) -> None:
    result = convert(TARGETS[target])
    assert contents(out) == expected(target)
    assert result.resumed == 0
    assert not (out / SOURCE_FOLDER).exists()
    if target == "nvfp4":
        report = verify(LocalFolder(out), VerifySettings())
        assert report.exit_code == 0, [f.message for f in report.findings]


def shard_sizes(hub: Any) -> dict[str, int]:
    files = hub.repos[REPO].commits[hub.repos[REPO].head]
    return {
        name: file.stat().st_size
        for name, file in files.items()
        if name.endswith(".safetensors") and "/" not in name
    }


class Watch:
    """Looks at the shards on the disk whenever the work tells of progress."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most_bytes = 0

    def start(self, label: str, total: int, unit: str) -> None: ...

    def advance(self, amount: int) -> None:
        self.note("")

    def note(self, text: str) -> None:
        sizes = []
        for path in self._folder.glob("model-*"):
            with suppress(FileNotFoundError):  # it may go, or take its name, at any moment
                if path.suffix in {".safetensors", ".partial"}:
                    sizes.append(path.stat().st_size)
        self.most_bytes = max(self.most_bytes, sum(sizes))


@pytest.mark.parametrize(("spare", "most"), [(0, 1), (1, 2), (2, 3), (100, 3)])
def test_no_more_shards_lie_on_the_disk_than_the_room_allows(
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    hub: Any,
    out: Path,
    spare: int,
    most: int,
) -> None:
    whole = expected("nvfp4")
    files = sum(len(data) for name, data in whole.items() if name.startswith("model-"))
    beside = 2 * sum(map(len, (whole[name] for name in whole.keys() & SIDECARS)))
    largest = max(shard_sizes(hub).values())
    watch = Watch(out / SOURCE_FOLDER)
    convert(progress=watch, free=lambda _: files + beside + (1 + spare) * largest)
    assert contents(out) == whole
    assert 0.6 * most * largest < watch.most_bytes <= most * largest


def test_too_little_disk_is_said_before_anything_is_written(
    convert: Callable[..., ConvertResult], hub: Any, out: Path
) -> None:
    with pytest.raises(ResourceError, match=r"need .* MB, have 1\.00 MB, short ") as caught:
        convert(free=lambda _: 1_000_000)
    assert "its hungriest file needs at once" in caught.value.hint
    assert not out.exists()


def test_wrong_bytes_are_fetched_again(
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    hub: Any,
    out: Path,
) -> None:
    hub.fault("00003-of", after=1, flip_at=500_000)  # after its header
    convert()
    assert hub.sent("model-00003-of-000012.safetensors") > 2 * 721_640
    assert contents(out) == expected("nvfp4")


def test_lasting_wrong_bytes_end_it_and_a_later_run_goes_on(
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    hub: Any,
    out: Path,
) -> None:
    fault = hub.fault("00005-of", after=1, times=1000, flip_at=500_000)
    with pytest.raises(HashError, match=r"00005-of-000012.*2 times"):
        convert()
    assert not (out / "model-00005-of-000012.safetensors").exists()
    assert not (out / "model.safetensors.index.json").exists()
    fault.times = 0
    result = convert()
    assert result.resumed >= 2
    assert contents(out) == expected("nvfp4")


def test_header_that_came_wrong_by_itself_is_noticed(
    convert: Callable[..., ConvertResult], hub: Any, nano: Path, out: Path
) -> None:
    name = "model-00002-of-000012.safetensors"
    data = (nano / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:end])
    ends = ("experts.0.w1.weight_packed", "experts.1.w1.weight_packed")
    one, two = (entry for tensor, entry in tensors.items() if tensor.endswith(ends))
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    wrong = data[:8] + json.dumps(tensors, separators=(",", ":")).encode().ljust(end - 8)
    # A header that is well formed and of the right length; the file itself comes right later.
    hub.fault(
        name,
        status=206,
        body=wrong + data[end:],
        headers={"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"},
    )
    with pytest.raises(HashError, match=r"00002-of-000012.*header that was read before"):
        convert()
    assert not (out / "model-00002-of-000012.safetensors").exists()


def test_branch_that_moves_changes_nothing(
    hub: Any,
    settings: DownloadSettings,
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    model: dict[str, Any],
    out: Path,
) -> None:
    repo = hub.repos[REPO]
    first = repo.head
    source = open_from_hub(parse_reference(REPO), out, settings)
    repo.commit({**model, "model-00001-of-000012.safetensors": b"other" * 1000})
    plan = to_nvfp4(source.checkpoint)
    fault = hub.fault("00007-of", times=1000, status=410)
    with pytest.raises(K3QuantError):
        convert_from_hub(source, out, plan, CONVERT)
    fault.times = 0
    convert()  # the same command line again, now that the branch means another commit
    assert contents(out) == expected("nvfp4")
    record = json.loads((out / "k3quant.proof.json").read_text())["job"]["parameters"]["source"]
    assert record == {"repository": REPO, "revision": "main", "commit": first}


def test_other_revision_is_refused_on_resume(
    convert: Callable[..., ConvertResult], hub: Any, model: dict[str, Any]
) -> None:
    convert()
    hub.repos[REPO].commit({**model, "new.txt": b"new"}, ref="v2")
    with pytest.raises(RefusedError, match="parameters it was started with"):
        convert(place=f"{REPO}@v2")


def test_what_came_too_far_ahead_is_removed_on_resume(
    convert: Callable[..., ConvertResult],
    expected: Callable[[str], dict[str, bytes]],
    hub: Any,
    out: Path,
    nano: Path,
) -> None:
    fault = hub.fault("00001-of", after=1, times=1000, status=410)
    with pytest.raises(K3QuantError):
        convert()
    fault.times = 0
    ahead = [out / SOURCE_FOLDER / f"model-000{n}-of-000012.safetensors" for n in ("05", "11")]
    for path in ahead:
        path.write_bytes((nano / path.name).read_bytes())
    (out / SOURCE_FOLDER / "stray.partial").write_bytes(b"x")
    watch = Watch(out / SOURCE_FOLDER)
    convert(progress=watch)
    assert watch.most_bytes <= 3 * max(shard_sizes(hub).values())
    assert contents(out) == expected("nvfp4")


def test_fault_of_the_conversion_ends_the_download(
    convert: Callable[..., ConvertResult], hub: Any, out: Path
) -> None:
    def to_int4(checkpoint: Checkpoint) -> ExportPlan:
        rules = recipe_for(
            "int4", scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
        )
        return plan_export(checkpoint, rules)

    hub.fault("00004-of", after=1, times=1000, bytes_per_second=1000.0)
    began = time.monotonic()
    with pytest.raises(RefusedError, match="lossless int4"):
        convert(to_int4, convert_settings=replace(CONVERT, require_lossless=True))
    assert time.monotonic() - began < 10
    assert not [t for t in threading.enumerate() if t.name.startswith(("download", "arriving"))]


def test_shards_stay_while_a_fused_group_across_files_needs_them(
    hub_server: Any,
    base: Path,
    settings: DownloadSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    move_w3(base)
    checkpoint = open_checkpoint(base)
    run_convert(checkpoint, tmp_path / "whole", to_nvfp4(checkpoint), CONVERT)
    server = hub_server.HubServer(hub_server.Repo(REPO, hub_server.folder_files(base)))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    source = open_from_hub(parse_reference(REPO), tmp_path / "out", settings)
    plan = to_nvfp4(source.checkpoint)
    arrival = plan_from_hub(source, tmp_path / "out", plan)
    two = sum(arrival.sizes[f"model-0000{n}-of-000003.safetensors"] for n in (2, 3))
    assert arrival.least_bytes == two
    convert_from_hub(source, tmp_path / "out", plan, CONVERT)
    server.close()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def move_w3(folder: Path) -> None:
    """Move every w3 of shard 2 to shard 3."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = [folder / f"model-0000{n}-of-000003.safetensors" for n in (2, 3)]
    tensors = []
    for file in files:
        with safe_open(file, "pt") as reader:
            tensors.append({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in [name for name in tensors[0] if ".w3." in name]:
        tensors[1][name] = tensors[0].pop(name)
        index["weight_map"][name] = files[1].name
    for file, content in zip(files, tensors, strict=True):
        save_file(content, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "SHA256SUMS").unlink()


def command(*words: str | Path, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_command_says_first_what_will_lie_on_the_disk(hub: Any, out: Path) -> None:
    words = ("convert", f"hf://{REPO}", "--out", out, "--to", "mxfp8", "--revision", "main")
    summary = command(*words, "--dry-run")["summary"]
    assert not out.exists()
    largest = max(shard_sizes(hub).values())
    assert summary["source_shards"] == 12
    assert summary["source_bytes"] == sum(shard_sizes(hub).values())
    assert summary["source_bytes_at_least"] == largest
    assert summary["source_bytes_at_once"] == 3 * largest
    summary = command(*words)["summary"]
    assert summary["exact"]
    assert summary["source"]["commit"] == hub.repos[REPO].head
    assert command(*words)["summary"]["resumed"] == 12


def test_command_takes_no_revision_for_a_folder(nano: Path, out: Path) -> None:
    found = command("convert", nano, "--out", out, "--to", "bf16", "--revision", "v1", code=2)
    assert "got a folder" in found["findings"][0]["message"]


def test_manifest_must_agree_with_the_hub(hub: Any, out: Path, tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{'0' * 64}  model-00001-of-000012.safetensors\n")
    words = ("convert", f"hf://{REPO}", "--out", out, "--to", "bf16", "--manifest", sums)
    found = command(*words, code=5)
    assert "as in the manifest" in found["findings"][0]["message"]


# Imports once, then forks a conversion for each line it reads, tells the child's id and its end.
NURSERY = """
import os, sys
from pathlib import Path
import huggingface_hub.utils
import torch
torch.set_num_threads(1)
from k3quant.convert.from_hub import convert_from_hub, open_from_hub
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.convert.run import ConvertSettings
from k3quant.formats.mx import ScaleRounding
from k3quant.hub.reference import parse_reference
from k3quant.hub.settings import DownloadSettings
rules = recipe_for(
    "nvfp4", scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
)
settings = DownloadSettings(jobs=3, piece_bytes=64 << 10, retry_wait=0.01)
out = Path(sys.argv[1])
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        source = open_from_hub(parse_reference("test/k3"), out, settings)
        plan = plan_export(source.checkpoint, rules)
        convert_from_hub(source, out, plan, ConvertSettings(parameters={"to": "it"}, jobs=2))
        os._exit(0)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_ten_kills_end_in_the_same_bytes(
    hub: Any, out: Path, expected: Callable[[str], dict[str, bytes]]
) -> None:
    whole = expected("nvfp4")
    hub.bytes_per_second = 3e6
    choose = random.Random(3)
    finished = 0
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, out],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as nursery:  # fmt: skip
        assert nursery.stdin
        assert nursery.stdout

        def start() -> int:
            assert nursery.stdin
            assert nursery.stdout
            nursery.stdin.write("go\n")
            nursery.stdin.flush()
            return int(nursery.stdout.readline())

        for _ in range(KILLS):
            asked = len(hub.files_asked())
            pid = start()
            until = time.monotonic() + 20
            while len(hub.files_asked()) < asked + HEADERS + 1 and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(choose.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGKILL)
            assert int(nursery.stdout.readline()) == -signal.SIGKILL
            assert not (out / "model.safetensors.index.json").exists()
            there = {p.name: p.read_bytes() for p in out.glob("model-*.safetensors")}
            assert there.items() <= whole.items()
            assert len(there) >= finished
            finished = len(there)
        hub.bytes_per_second = None
        start()
        assert int(nursery.stdout.readline()) == 0
        nursery.stdin.close()
    assert finished >= 1
    assert contents(out) == whole
    assert not (out / SOURCE_FOLDER).exists()
