import numpy as np
import pytest

from k3quant.eval.windows import plan_windows


def _plan(*documents, **options):
    return list(plan_windows([np.array(ids, dtype=np.int64) for ids in documents], **options))


@pytest.mark.parametrize("ctx", [1, 2, 7, 24, 25, 100])
@pytest.mark.parametrize("overlap", ["none", "half", "all-but-one"])
def test_every_id_but_the_first_is_scored_once(ctx, overlap):
    stride = {"none": ctx, "half": max(1, ctx // 2), "all-but-one": 1}[overlap]
    windows = _plan(range(25), ctx=ctx, stride=stride)
    assert np.concatenate([w.targets for w in windows]).tolist() == list(range(1, 25))
    for window in windows:
        assert len(window.inputs) <= ctx
        # The last target follows the last input.
        assert window.targets[-1] == window.inputs[-1] + 1


def test_the_bundled_text_makes_47_windows():
    windows = _plan(range(23919), ctx=512, stride=512)
    assert len(windows) == 47
    assert sum(len(w.targets) for w in windows) == 23918
    assert windows[1].inputs[0] == 512
    assert windows[0].targets[-1] == 512


def test_overlapping_windows_score_only_what_is_new():
    windows = _plan(range(11), ctx=4, stride=2)
    assert [w.inputs.tolist() for w in windows] == [
        [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9],
    ]  # fmt: skip
    assert [w.targets.tolist() for w in windows] == [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]


@pytest.mark.parametrize("stride", [4, 2], ids=["disjoint", "overlapping"])
def test_bos_stands_before_every_window_and_changes_no_target(stride):
    plain = _plan(range(11), ctx=4, stride=stride)
    with_bos = _plan(range(11), ctx=4, stride=stride, bos=99)
    assert len(plain) > 1
    for a, b in zip(plain, with_bos, strict=True):
        assert b.inputs.tolist() == [99, *a.inputs.tolist()]
        assert b.targets.tolist() == a.targets.tolist()


def test_documents_are_scored_apart():
    windows = _plan([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], ctx=512, stride=512)
    assert [w.inputs.tolist() for w in windows] == [[1, 2], [4, 5, 6, 7, 8, 9]]
    assert sum(len(w.targets) for w in windows) == 2 + 6


@pytest.mark.parametrize(("count", "scored"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_short_documents_score_what_follows_their_first_id(count, scored):
    assert sum(len(w.targets) for w in _plan(range(count), ctx=512, stride=512)) == scored


def test_ids_that_equal_the_pad_id_are_scored():
    (window,) = _plan([5, 0, 7, 0], ctx=512, stride=512)
    assert window.targets.tolist() == [0, 7, 0]


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_out_of_range_is_refused(stride):
    with pytest.raises(ValueError, match="stride"):
        _plan(range(9), ctx=4, stride=stride)
