import errno
import hashlib
import json
import os

import pytest
from safetensors import safe_open

from k3quant.checkpoint.journal import JOURNAL_FILE
from k3quant.checkpoint.output_file import OutputFile
from k3quant.checkpoint.reader import open_checkpoint
from k3quant.checkpoint.writer import ShardWriter
from k3quant.errors import ExitCode, IncompleteError, RefusedError, ResourceError, UsageError
from k3quant.repack import copying
from k3quant.repack.plan import plan_repack
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.repack.sidecars import sort_sidecars

INDEX = "model.safetensors.index.json"


def _shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("which", ["nano", "oracle"])
@pytest.mark.parametrize(
    "between",
    [
        pytest.param(RepackSettings(max_shard_bytes=300_000), id="size"),
        pytest.param(RepackSettings(layout=Layout.RANK, ranks=3), id="ranks"),
    ],
)
def test_the_released_layout_comes_back_byte_for_byte(request, tmp_path, files, which, between):
    source = request.getfixturevalue(which)
    run_repack(source, tmp_path / "between", between)
    run_repack(tmp_path / "between", tmp_path / "back", RepackSettings(layout=Layout.ORIGINAL))
    before, after = files(source), files(tmp_path / "back")
    assert before.keys() == after.keys()
    old, new = json.loads(before.pop(INDEX)), json.loads(after.pop(INDEX))
    assert old == new  # the release sorts its index, others may not
    assert before == after


def test_a_new_index_names_the_new_files(base, tmp_path, digests):
    before = digests(base)
    old = json.loads((base / INDEX).read_text())
    run_repack(base, tmp_path / "out", RepackSettings(max_shard_bytes=60_000))
    new = json.loads((tmp_path / "out" / INDEX).read_text())
    assert sorted(set(new["weight_map"].values())) == _shards(tmp_path / "out")
    assert len(_shards(tmp_path / "out")) > 3
    assert new["metadata"] == old["metadata"]
    assert digests(tmp_path / "out") == before


def test_one_file_takes_the_single_name_and_its_index_agrees(base, tmp_path, digests):
    out = tmp_path / "out"
    run_repack(base, out, RepackSettings(max_shard_bytes=10**12))
    assert _shards(out) == ["model.safetensors"]
    assert set(json.loads((out / INDEX).read_text())["weight_map"].values()) == {
        "model.safetensors"
    }
    assert digests(out) == digests(base)


@pytest.mark.parametrize("case", ["base", "R10", "R11", "V28", "V33", "V34", "V24b"])
def test_legal_oddities_survive(cases, tmp_path, digests, case):
    run_repack(cases / case, tmp_path / "out", RepackSettings(layout=Layout.LAYER))
    assert digests(tmp_path / "out") == digests(cases / case)


def test_tied_weights_keep_two_ranges(cases, tmp_path):
    run_repack(cases / "R11", tmp_path / "out", RepackSettings(max_shard_bytes=10**9))
    entries = open_checkpoint(tmp_path / "out").entries
    head = entries["language_model.lm_head.weight"]
    embedding = entries["language_model.model.embed_tokens.weight"]
    assert head.offset != embedding.offset
    assert head.length == embedding.length


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("BOOL", 1), ("U16", 2), ("F16", 2),
     ("BF16", 2), ("F32", 4), ("I64", 8), ("F64", 8)],
)  # fmt: skip
def test_every_bit_pattern_of_every_dtype_survives(tmp_path, digests, dtype, width):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    data = bytes(range(256)) * width
    with ShardWriter(source / "model.safetensors", [("t", dtype, (256,))]) as writer:
        writer.write("t", data)
    run_repack(source, tmp_path / "out", RepackSettings(align=4096))
    assert digests(tmp_path / "out")["t"] == (dtype, (256,), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("align", [64, 4096])
def test_data_sections_are_aligned_without_holes(base, tmp_path, digests, align):
    out = tmp_path / "out"
    run_repack(base, out, RepackSettings(align=align))
    checkpoint = open_checkpoint(out)
    assert all(header.data_start % align == 0 for header in checkpoint.headers.values())
    assert digests(out) == digests(base)
    for file in _shards(out):
        with safe_open(out / file, framework="pt") as shard:
            assert set(shard.keys()) == set(checkpoint.headers[file].tensors)


def test_metadata_stays_where_the_shards_of_a_file_agree(base, tmp_path):
    first = base / "model-00001-of-000003.safetensors"
    checkpoint = open_checkpoint(base)
    header = checkpoint.headers[first.name]
    entries = [(name, e.dtype, e.shape) for name, e in header.tensors.items()]
    data = {name: checkpoint.read(name) for name in header.tensors}
    with ShardWriter(first, entries, metadata={"format": "np", "by": "me"}) as writer:
        for name, array in data.items():
            writer.write(name, array)
    report = run_repack(base, tmp_path / "out", RepackSettings(layout=Layout.ORIGINAL))
    headers = open_checkpoint(tmp_path / "out").headers
    # Layer 0 and the globals come from the first shard, layers 1 and 2 from the others.
    metadata = [headers[file].metadata for file in sorted(headers)]
    assert metadata == [
        {"format": "np", "by": "me"},
        {"format": "pt"},
        {"format": "pt"},
        {"format": "np", "by": "me"},
    ]
    assert [finding.code for finding in report.findings] == ["metadata"]
    run_repack(base, tmp_path / "one", RepackSettings(max_shard_bytes=10**9))
    (header,) = open_checkpoint(tmp_path / "one").headers.values()
    assert header.metadata == {"by": "me"}


class TestSidecars:
    def test_all_but_what_the_layout_replaces_are_copied(self, base, tmp_path, files):
        for name in ("tiktoken.model", "modeling_kimi.py", "chat_template", "docs/a/x.pdf"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text(f"content of {name}")
        for name in (".cache/huggingface/x.lock", "y.incomplete", f"{INDEX[:-5]}.rank-0.json"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text("old")
        report = run_repack(base, tmp_path / "out", RepackSettings(layout=Layout.LAYER))
        copied = ["chat_template", "config.json", "docs/a/x.pdf", "modeling_kimi.py",
                  "tiktoken.model", "tokenizer_config.json"]  # fmt: skip
        assert report.summary["sidecars"] == copied
        before, after = files(base), files(tmp_path / "out")
        assert all(before[name] == after[name] for name in copied)
        others = {name for name in after if not name.endswith(".safetensors")} - set(copied)
        assert others == {INDEX, "SHA256SUMS"}

    def test_digests_beside_the_shards_are_those_of_the_new_shards(self, base, tmp_path):
        out = tmp_path / "out"
        sums = (base / "SHA256SUMS").read_text() + f"{'0' * 64}  config.json\n"
        (base / "SHA256SUMS").write_text(sums)
        run_repack(base, out, RepackSettings(max_shard_bytes=60_000))
        lines = dict(
            line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines()
        )
        assert set(lines) == {*_shards(out), "config.json"}
        assert lines.pop("config.json") == "0" * 64
        for file, digest in lines.items():
            assert hashlib.sha256((out / file).read_bytes()).hexdigest() == digest

    def test_weights_that_no_index_names_stay_behind_and_are_told(self, cases, tmp_path):
        report = run_repack(cases / "D10", tmp_path / "out", RepackSettings())
        (warning,) = report.findings
        assert warning.code == "stray-shards"
        assert "3 files" in warning.message
        assert not (tmp_path / "out" / "original").exists()

    def test_the_journal_of_an_earlier_run_is_not_copied(self, tiny):
        (tiny / JOURNAL_FILE).write_text("{}")
        sidecars = sort_sidecars(open_checkpoint(tiny).source, _shards(tiny))
        assert JOURNAL_FILE in sidecars.skipped


class TestLinks:
    def test_shards_that_stay_whole_are_linked_and_need_no_room(self, tiny, tmp_path):
        settings = RepackSettings(layout=Layout.ORIGINAL, link=True)
        report = run_repack(tiny, tmp_path / "out", settings, free=lambda _: 200_000)
        assert report.summary["linked_files"] == 7
        assert report.summary["bytes_to_copy"] == 0
        for file in _shards(tiny):
            assert (tmp_path / "out" / file).samefile(tiny / file)

    def test_a_file_under_another_name_is_linked_too(self, tiny, tmp_path):
        report = run_repack(tiny, tmp_path / "out", RepackSettings(layout=Layout.LAYER, link=True))
        assert report.summary["linked_files"] == 4
        layer = tmp_path / "out" / "model-layer-00001.safetensors"
        assert layer.samefile(tiny / "model-00002-of-000007.safetensors")

    def test_other_alignment_is_copied(self, tiny, tmp_path):
        report = run_repack(tiny, tmp_path / "out", RepackSettings(link=True, align=4096))
        assert report.summary["linked_files"] == 0

    def test_without_the_option_nothing_is_linked(self, tiny, tmp_path):
        run_repack(tiny, tmp_path / "out", RepackSettings())
        assert all((tmp_path / "out" / file).stat().st_nlink == 1 for file in _shards(tiny))


class TestSpace:
    def test_a_full_disk_is_told_before_anything_is_written(self, tiny, tmp_path):
        out = tmp_path / "out"
        settings = RepackSettings(max_shard_bytes=60_000)
        need = plan_repack(tiny, settings).summary()["file_bytes"]
        with pytest.raises(ResourceError, match=r"need .*, have .*, short ") as caught:
            run_repack(tiny, out, settings, free=lambda _: need - 1)
        assert caught.value.exit_code is ExitCode.IO
        assert "--link" in caught.value.hint
        assert not out.exists()

    def test_what_is_asked_for_is_what_is_written(self, tiny, tmp_path, files):
        out = tmp_path / "out"
        asked = []
        settings = RepackSettings(layout=Layout.RANK, ranks=2)

        def refuse(folder):
            asked.append(folder)
            return 0

        with pytest.raises(ResourceError) as caught:
            run_repack(tiny, out, settings, free=refuse)
        assert asked == [out]
        run_repack(tiny, out, settings)
        written = sum(len(content) for content in files(out).values())
        need = caught.value.message.partition("need ")[2].partition(" KB")[0]
        assert float(need) * 1000 == pytest.approx(written, rel=0.01)

    def test_a_disk_that_fills_leaves_a_run_to_resume(self, tiny, tmp_path, monkeypatch, files):
        out, settings = tmp_path / "out", RepackSettings(layout=Layout.LAYER)
        real = os.posix_fallocate
        calls = []

        def fill(fd, offset, length):
            calls.append(length)
            if len(calls) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(fd, offset, length)

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fill)
            with pytest.raises(ResourceError, match="no space left"):
                run_repack(tiny, out, settings, jobs=1)
        assert not (out / INDEX).exists()
        written = len(_shards(out))
        assert 2 <= written < 5
        report = run_repack(tiny, out, settings)
        assert report.summary["resumed_files"] == written
        run_repack(tiny, tmp_path / "other", settings)
        assert files(out) == files(tmp_path / "other")


class TestResume:
    @pytest.fixture
    def cut_short(self, tiny, tmp_path, monkeypatch):
        out, settings = tmp_path / "out", RepackSettings(max_shard_bytes=60_000)
        real = copying.ShardCopier.write_shard

        def stop(self, path, planned):
            if path.name.startswith("model-00003"):
                raise KeyboardInterrupt
            return real(self, path, planned)

        with monkeypatch.context() as patch:
            patch.setattr(copying.ShardCopier, "write_shard", stop)
            with pytest.raises(KeyboardInterrupt):
                run_repack(tiny, out, settings, jobs=1)
        assert len(_shards(out)) == 2
        return out, settings

    def test_finished_outputs_are_not_written_again(self, cut_short, tiny, monkeypatch):
        out, settings = cut_short
        written = []
        real = OutputFile.__enter__
        monkeypatch.setattr(
            OutputFile, "__enter__", lambda self: (written.append(self.path.name), real(self))[1]
        )
        run_repack(tiny, out, settings)
        assert not {"model-00001-of-000008.safetensors"} & set(written)
        assert {f for f in written if f.endswith(".safetensors")} == set(_shards(out)[2:])

    def test_a_finished_output_that_shrank_is_written_again(self, cut_short, tiny, digests):
        out, settings = cut_short
        first = out / _shards(out)[0]
        first.write_bytes(first.read_bytes()[:-1])
        run_repack(tiny, out, settings)
        assert digests(out) == digests(tiny)

    def test_other_parameters_are_refused_with_both_sets(self, cut_short, tiny):
        out, _ = cut_short
        with pytest.raises(RefusedError) as caught:
            run_repack(tiny, out, RepackSettings(max_shard_bytes=80_000))
        assert '"max_shard_bytes": 60000' in caught.value.message
        assert '"max_shard_bytes": 80000' in caught.value.message
        assert caught.value.exit_code is ExitCode.REFUSED

    def test_a_source_that_changed_is_refused(self, cut_short, tiny):
        out, settings = cut_short
        os.utime(tiny / _shards(tiny)[0], ns=(1, 1))
        with pytest.raises(RefusedError, match="changed at 1 ns"):
            run_repack(tiny, out, settings)

    def test_a_finished_run_has_nothing_left_to_do(self, tiny, tmp_path, files):
        out = tmp_path / "out"
        run_repack(tiny, out, RepackSettings())
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        report = run_repack(tiny, out, RepackSettings())
        assert report.summary["resumed_files"] == 7
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


class TestRefusals:
    def test_an_output_folder_with_files_is_refused(self, tiny, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("x")
        with pytest.raises(RefusedError, match="expected an empty output folder"):
            run_repack(tiny, tmp_path / "out", RepackSettings())

    @pytest.mark.parametrize("place", [".", "inside/out", ".."])
    def test_folders_that_overlap_are_refused(self, tiny, place):
        with pytest.raises(UsageError, match="outside the source"):
            run_repack(tiny, tiny / place, RepackSettings())

    def test_another_folder_is_refused_in_place(self, tiny, tmp_path):
        with pytest.raises(UsageError, match="expected the source's folder"):
            run_repack(tiny, tmp_path / "out", RepackSettings(in_place=True))

    def test_a_missing_shard_is_incomplete(self, tiny, tmp_path):
        (tiny / _shards(tiny)[2]).unlink()
        with pytest.raises(IncompleteError, match=r"model-00003-of-000007\.safetensors: missing"):
            run_repack(tiny, tmp_path / "out", RepackSettings())
        assert not (tmp_path / "out").exists()

    def test_a_source_that_changes_meanwhile_is_refused(self, tiny, tmp_path, monkeypatch):
        file = tiny / _shards(tiny)[1]
        write = copying.ShardCopier.write_shard

        def change(self, path, planned):
            os.utime(file, ns=(1, 1))
            return write(self, path, planned)

        monkeypatch.setattr(copying.ShardCopier, "write_shard", change)
        with pytest.raises(RefusedError, match="got a change meanwhile"):
            run_repack(tiny, tmp_path / "out", RepackSettings())
        assert not (tmp_path / "out" / INDEX).exists()


def test_the_overall_index_is_the_last_file_to_appear(tiny, tmp_path, monkeypatch):
    order = []
    real = OutputFile.__exit__

    def note(self, *error):
        real(self, *error)
        order.append(self.path.name)

    monkeypatch.setattr(OutputFile, "__exit__", note)
    run_repack(tiny, tmp_path / "out", RepackSettings(layout=Layout.RANK, ranks=2))
    assert order[-3:] == [
        "model.safetensors.index.rank-00000-of-000002.json",
        "model.safetensors.index.rank-00001-of-000002.json",
        INDEX,
    ]


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_result_does_not_depend_on_the_jobs(tiny, tmp_path, files, jobs):
    settings = RepackSettings(max_shard_bytes=60_000)
    run_repack(tiny, tmp_path / "two", settings)
    run_repack(tiny, tmp_path / "other", settings, jobs=jobs)
    assert files(tmp_path / "two") == files(tmp_path / "other")


def test_the_report_has_the_digest_of_every_output(tiny, tmp_path):
    report = run_repack(tiny, tmp_path / "out", RepackSettings(layout=Layout.LAYER))
    outputs = {line["file"]: line["sha256"] for line in report.summary["outputs"]}
    assert set(outputs) == set(_shards(tmp_path / "out"))
    for file, digest in outputs.items():
        raw = (tmp_path / "out" / file).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == digest
