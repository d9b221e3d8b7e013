import errno
import json
import os
from pathlib import Path

import pytest

from k3quant.checkpoint.journal import JOURNAL_FILE
from k3quant.checkpoint.output_file import OutputFile
from k3quant.errors import HashError, IncompleteError, RefusedError, ResourceError
from k3quant.repack import holes, in_place
from k3quant.repack.in_place import extra_space
from k3quant.repack.plan import plan_repack
from k3quant.repack.run import run_repack
from k3quant.repack.settings import Layout, RepackSettings
from k3quant.repack.sidecars import SET_ASIDE_FOLDER
from k3quant.synth.run import synth

INDEX = "model.safetensors.index.json"
BY_SIZE = RepackSettings(max_shard_bytes=60_000, in_place=True)


def _shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_shard_bytes": 30_000}, id="size"),
        pytest.param({"layout": Layout.LAYER}, id="layer"),
        pytest.param({"layout": Layout.RANK, "ranks": 3}, id="ranks"),
        pytest.param({"layout": Layout.RANK, "ranks": 5, "max_shard_bytes": 9000}, id="small"),
        pytest.param({"align": 4096}, id="align"),
        pytest.param({}, id="keep"),
    ],
)
def test_the_result_is_that_of_a_run_into_another_folder(tiny, tmp_path, files, settings):
    run_repack(tiny, tmp_path / "out", RepackSettings(**settings))
    run_repack(tiny, tiny, RepackSettings(**settings, in_place=True))
    assert files(tiny) == files(tmp_path / "out")
    assert not (tiny / JOURNAL_FILE).exists()
    assert not (tiny / SET_ASIDE_FOLDER).exists()


def test_a_chain_of_layouts_leads_back(tiny, files):
    before = files(tiny)
    for settings in (
        BY_SIZE,
        RepackSettings(layout=Layout.RANK, ranks=2, in_place=True),
        RepackSettings(layout=Layout.LAYER, align=64, in_place=True),
        RepackSettings(layout=Layout.ORIGINAL, in_place=True),
    ):
        run_repack(tiny, tiny, settings)
    assert files(tiny) == before


def test_digests_beside_the_shards_follow(base):
    run_repack(base, base, RepackSettings(layout=Layout.LAYER, in_place=True))
    listed = [line[66:] for line in (base / "SHA256SUMS").read_text().splitlines()]
    assert listed == _shards(base)


def test_the_index_of_a_rank_goes_with_its_layout(tiny):
    run_repack(tiny, tiny, RepackSettings(layout=Layout.RANK, ranks=2, in_place=True))
    assert len(list(tiny.glob("*.index*.json"))) == 3
    run_repack(tiny, tiny, RepackSettings(layout=Layout.ORIGINAL, in_place=True))
    assert [path.name for path in tiny.glob("*.index*.json")] == [INDEX]


def test_a_shard_is_given_up_only_after_its_tensors_are_safe(tiny, monkeypatch):
    events = []
    sync, replace, unlink = os.fsync, Path.replace, Path.unlink
    journal, read_back = in_place.Journal.record, in_place._read_back

    def log(event, function, pick):
        def wrapped(*args, **options):
            result = function(*args, **options)
            events.append((event, pick(*args)))
            return result

        return wrapped

    monkeypatch.setattr(
        os, "fsync", log("sync", sync, lambda fd: Path(f"/proc/self/fd/{fd}").readlink().name)
    )
    monkeypatch.setattr(Path, "replace", log("rename", replace, lambda old, new: new.name))
    monkeypatch.setattr(Path, "unlink", log("unlink", unlink, lambda path: path.name))
    monkeypatch.setattr(in_place, "_read_back", log("read", read_back, lambda path, *_: path.name))
    monkeypatch.setattr(in_place.Journal, "record", log("record", journal, lambda _, w: w.file))
    monkeypatch.setattr(in_place, "punch_hole", log("punch", in_place.punch_hole, lambda *_: ""))
    plan = plan_repack(tiny, BY_SIZE)
    run_repack(tiny, tiny, BY_SIZE)

    needs = {}
    for shard in plan.shards.files:
        for item in shard.items:
            needs.setdefault(f"{plan.entries[item.name].file}.moved", set()).add(shard.file)
    safe = set()
    given_up = []
    for at, (event, what) in enumerate(events):
        if event == "record":
            before = events[:at]
            written = before.index(("rename", what))
            assert ("sync", f"{what}.partial") in before[:written]
            assert ("sync", tiny.name) in before[written:]
            assert ("read", what) in before[written:]
            assert events[at - 1] == ("sync", JOURNAL_FILE)
            safe.add(what)
        if event == "unlink" and what in needs:
            assert needs[what] <= safe
            given_up.append(what)
        if event == "punch":
            assert safe
    assert set(given_up) == set(needs)


@pytest.mark.parametrize(
    "settings", [BY_SIZE, RepackSettings(layout=Layout.RANK, ranks=4, in_place=True)]
)
def test_never_more_than_one_output_besides_the_source(
    tmp_path, tiny_config, monkeypatch, settings
):
    folder = tmp_path / "source"
    config = tiny_config(experts=12, hidden=128)
    config["text_config"] |= {"moe_intermediate_size": 256, "routed_expert_hidden_size": 256}
    synth(config, folder, sparse=False)
    settings = RepackSettings(
        layout=settings.layout, ranks=settings.ranks, in_place=True, max_shard_bytes=400_000
    )
    plan = plan_repack(folder, settings)

    def used():
        return sum(
            path.stat().st_blocks * 512
            for path in folder.rglob("*")
            if ".safetensors" in path.name
            and not path.name.endswith((".json", ".header", ".moved.json"))
        )

    before = used()
    most = 0
    record = in_place.Journal.record

    def measure(self, written, **options):
        nonlocal most
        most = max(most, used() - before)
        record(self, written, **options)

    monkeypatch.setattr(in_place.Journal, "record", measure)
    run_repack(folder, folder, settings)
    largest = max(plan.sizes.values())
    extra = extra_space(plan, punch=True, block=4096)
    assert most <= extra + 4096 * (len(plan.sizes) + 7)
    # Blocks that two tensors share are freed when both have moved on.
    assert extra <= largest + 4096 * plan.num_ranges
    assert extra_space(plan, punch=False, block=4096) > 2 * largest


def test_extra_space_counts_whole_files_where_holes_cannot_be_made(tiny):
    plan = plan_repack(tiny, RepackSettings(max_shard_bytes=10**9, in_place=True))
    size = sum(plan.sizes.values())
    assert extra_space(plan, punch=False, block=4096) == size
    kept = plan_repack(tiny, RepackSettings(in_place=True))
    assert extra_space(kept, punch=False, block=4096) == 0


def test_a_full_disk_is_told_before_anything_is_moved(tiny, files):
    before = files(tiny)
    with pytest.raises(ResourceError, match=r"need .*, have 0 B, short"):
        run_repack(tiny, tiny, BY_SIZE, free=lambda _: 0)
    assert files(tiny) == before
    assert not (tiny / JOURNAL_FILE).exists()


def test_without_holes_a_layout_that_needs_them_is_refused(tiny, files, monkeypatch):
    def refuse(fd, begin, end):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    before = files(tiny)
    monkeypatch.setattr(holes, "punch_hole", refuse)
    settings = RepackSettings(layout=Layout.RANK, ranks=5, max_shard_bytes=60_000, in_place=True)
    with pytest.raises(RefusedError, match="expected a file system that frees parts of a file"):
        run_repack(tiny, tiny, settings)
    assert files(tiny) == before
    # A file of the released layout becomes a file of the same tensors: nothing needs holes.
    run_repack(tiny, tiny, RepackSettings(align=64, in_place=True))


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_a_shard_with_a_second_name_is_refused(tiny, tmp_path, files, kind):
    shard = tiny / _shards(tiny)[1]
    if kind == "hard":
        os.link(shard, tmp_path / "other")
    else:
        shard.rename(tmp_path / "other")
        shard.symlink_to(tmp_path / "other")
    before = files(tiny)
    with pytest.raises(RefusedError, match=f"{shard.name}: expected a file of its own, got a"):
        run_repack(tiny, tiny, BY_SIZE)
    after = files(tiny)
    assert {name: after[name] for name in before} == before
    assert (tmp_path / "other").read_bytes() == before[shard.name]


def test_a_file_in_the_way_is_refused(tiny):
    file = tiny / max(plan_repack(tiny, BY_SIZE).sizes)
    file.write_bytes(b"mine")
    with pytest.raises(RefusedError, match="got a file that is no shard of the index"):
        run_repack(tiny, tiny, BY_SIZE)
    assert file.read_bytes() == b"mine"


def test_an_output_that_reads_back_differently_ends_the_work(tiny, monkeypatch, digests):
    before = digests(tiny)
    commit = OutputFile._commit

    def damage(self):
        commit(self)
        if self.path.name.startswith("model-00002") and self.path.suffix == ".safetensors":
            raw = bytearray(self.path.read_bytes())
            raw[-1] ^= 1
            self.path.write_bytes(raw)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "_commit", damage)
        with pytest.raises(HashError, match=r"model-00002.*expected the source's bytes"):
            run_repack(tiny, tiny, BY_SIZE)
    run_repack(tiny, tiny, BY_SIZE)
    assert digests(tiny) == before


class TestResume:
    @pytest.fixture
    def cut_short(self, tiny, monkeypatch):
        real = in_place.ShardCopier.write_shard

        def stop(self, path, planned):
            if path.name.startswith("model-00004"):
                raise KeyboardInterrupt
            return real(self, path, planned)

        with monkeypatch.context() as patch:
            patch.setattr(in_place.ShardCopier, "write_shard", stop)
            with pytest.raises(KeyboardInterrupt):
                run_repack(tiny, tiny, BY_SIZE)
        return tiny

    def test_meanwhile_nothing_looks_like_a_checkpoint(self, cut_short):
        assert not (cut_short / INDEX).exists()
        assert len(_shards(cut_short)) == 3
        with pytest.raises(IncompleteError):
            plan_repack(cut_short, RepackSettings())

    def test_the_same_command_ends_the_work(self, cut_short, digests, tiny_source):
        report = run_repack(cut_short, cut_short, BY_SIZE)
        assert report.summary["resumed_files"] == 3
        assert digests(cut_short) == digests(tiny_source)

    def test_other_parameters_are_refused(self, cut_short):
        settings = RepackSettings(max_shard_bytes=70_000, in_place=True)
        with pytest.raises(RefusedError, match='"max_shard_bytes": 60000'):
            run_repack(cut_short, cut_short, settings)

    def test_without_the_journal_the_work_is_not_guessed_at(self, cut_short):
        (cut_short / JOURNAL_FILE).unlink()
        with pytest.raises(RefusedError, match="of the work in place that began here, got none"):
            run_repack(cut_short, cut_short, BY_SIZE)

    def test_files_of_earlier_work_without_their_list_are_left_alone(self, cut_short):
        (cut_short / SET_ASIDE_FOLDER / "source.json").unlink()
        moved = sorted((cut_short / SET_ASIDE_FOLDER).glob("*.moved"))
        with pytest.raises((RefusedError, IncompleteError)):
            run_repack(cut_short, cut_short, BY_SIZE)
        assert sorted((cut_short / SET_ASIDE_FOLDER).glob("*.moved")) == moved


def test_files_in_folders_of_the_source_are_moved_too(tiny, digests):
    before = digests(tiny)
    (tiny / "parts").mkdir()
    index = json.loads((tiny / INDEX).read_text())
    for file in _shards(tiny)[:2]:
        (tiny / file).rename(tiny / "parts" / file)
        for name, held in index["weight_map"].items():
            if held == file:
                index["weight_map"][name] = f"parts/{file}"
    (tiny / INDEX).write_text(json.dumps(index))
    run_repack(tiny, tiny, BY_SIZE)
    assert digests(tiny) == before
    assert list((tiny / "parts").iterdir()) == []
    run_repack(tiny, tiny, RepackSettings(layout=Layout.ORIGINAL, in_place=True))
    assert digests(tiny) == before


def test_a_plan_tells_the_space_it_takes_and_writes_nothing(tiny, files):
    before = files(tiny)
    found = in_place.plan_in_place(tiny, BY_SIZE).summary
    plan = plan_repack(tiny, BY_SIZE)
    block = os.statvfs(tiny).f_bsize
    expected = extra_space(plan, punch=holes.can_punch(tiny), block=block)
    assert found["extra_bytes"] == expected
    assert 0 < expected < 2 * max(plan.sizes.values())
    assert found == plan.summary() | {"extra_bytes": expected}
    assert files(tiny) == before


def test_a_plan_refuses_what_the_run_would_refuse(tiny):
    (tiny / sorted(plan_repack(tiny, BY_SIZE).sizes)[-1]).write_bytes(b"mine")
    with pytest.raises(RefusedError, match="no shard of the index"):
        in_place.plan_in_place(tiny, BY_SIZE)
