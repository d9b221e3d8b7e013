import pytest

from k3quant.errors import ExitCode, UsageError
from k3quant.repack.settings import Layout, RepackSettings, parse_layout, parse_span


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        pytest.param({}, Layout.KEEP, id="nothing"),
        pytest.param({"max_shard_bytes": 5}, Layout.SIZE, id="size"),
        pytest.param({"layers": (0, 1)}, Layout.ORIGINAL, id="cut"),
        pytest.param({"layers": (0, 1), "max_shard_bytes": 5}, Layout.SIZE, id="cut by size"),
        pytest.param({"layout": Layout.LAYER, "layers": (0, 1)}, Layout.LAYER, id="cut by layer"),
    ],
)
def test_the_layout_has_a_default(options, layout):
    assert RepackSettings(**options).chosen_layout is layout


def test_ranks_have_files_of_at_most_20_gb():
    assert RepackSettings(layout=Layout.RANK, ranks=2).file_limit == 20_000_000_000
    assert RepackSettings(layout=Layout.RANK, ranks=2, max_shard_bytes=7).file_limit == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"layout": Layout.RANK}, "expected a number of ranks", id="no ranks"),
        pytest.param({"ranks": 3}, "expected a number of ranks", id="ranks alone"),
        pytest.param({"layout": Layout.SIZE}, "expected a size limit", id="size without limit"),
        pytest.param(
            {"layout": Layout.ORIGINAL, "max_shard_bytes": 9}, "no size limit", id="two layouts"
        ),
        pytest.param({"max_shard_bytes": 0}, "at least 1 byte, got 0", id="no room"),
        pytest.param({"align": 12}, "multiple of 8 bytes, got 12", id="odd alignment"),
        pytest.param({"align": 0}, "multiple of 8 bytes, got 0", id="no alignment"),
        pytest.param({"layers": (3, 2)}, "layers: expected FIRST-LAST", id="backwards"),
        pytest.param({"experts": (-1, 2)}, "experts: expected FIRST-LAST", id="negative"),
        pytest.param(
            {"in_place": True, "experts": (0, 1)}, "would remove tensors", id="cut in place"
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        RepackSettings(**options)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("layer", (Layout.LAYER, None)),
        ("original", (Layout.ORIGINAL, None)),
        ("keep", (Layout.KEEP, None)),
        ("expert-rank:32", (Layout.RANK, 32)),
    ],
)
def test_a_layout_is_read(text, layout):
    assert parse_layout(text) == layout


@pytest.mark.parametrize("text", ["", "size", "expert-rank", "expert-rank:0", "expert-rank:²", "x"])
def test_other_layouts_are_refused(text):
    with pytest.raises(UsageError, match="expected `layer`, `original`, `keep` or"):
        parse_layout(text)


@pytest.mark.parametrize(("text", "span"), [("0-7", (0, 7)), ("3", (3, 3)), ("92-92", (92, 92))])
def test_a_span_is_read(text, span):
    assert parse_span(text, what="layers") == span


@pytest.mark.parametrize("text", ["", "-", "7-3", "1-", "-2", "a-b", "1-2-3", "1.5"])
def test_other_spans_are_refused(text):
    with pytest.raises(UsageError, match="layers: expected FIRST-LAST"):
        parse_span(text, what="layers")
