import numpy as np
import pytest

from k3quant.errors import ResourceError
from k3quant.eval.memory import bytes_per_token, fixed_bytes, plan_passes
from k3quant.eval.windows import plan_windows
from k3quant.models.k3_config import read_config


def _windows():
    return list(plan_windows([np.arange(1001)], ctx=100, stride=100))


def _budget(config, tokens, walks=1, streams=1):
    return 1000 + walks * fixed_bytes(config) + streams * tokens * bytes_per_token(config)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1000, [10]), (999, [9, 1]), (250, [2] * 5), (100, [1] * 10)]
)
@pytest.mark.parametrize(
    ("walks", "streams"), [(1, 1), (2, 2), (2, 3)], ids=["alone", "with-reference", "forced"]
)
def test_windows_are_split_into_passes_that_fit(k3_config, tokens, expected, walks, streams):
    config = read_config(k3_config)
    budget = _budget(config, tokens, walks, streams)
    passes = list(
        plan_passes(
            _windows(), config, ram_bytes=budget, ahead_bytes=1000, walks=walks, streams=streams
        )
    )
    assert [len(together) for together in passes] == expected
    starts = [int(w.inputs[0]) for together in passes for w in together]
    assert starts == list(range(0, 1000, 100))


def test_no_budget_is_one_pass(k3_config):
    (together,) = plan_passes(
        _windows(), read_config(k3_config), ram_bytes=None, ahead_bytes=1 << 40
    )
    assert len(together) == 10


def test_a_window_that_does_not_fit_is_refused(k3_config):
    config = read_config(k3_config)
    with pytest.raises(ResourceError, match="window of 100 tokens"):
        list(plan_passes(_windows(), config, ram_bytes=_budget(config, 99), ahead_bytes=1000))


def test_k3_holds_some_400_kilobytes_a_token_and_9_gigabytes_beside(k3_config):
    config = read_config(k3_config)
    # Layer 0 is the widest: KDA and the dense MLP, as it is stored and as it computes.
    # 8 blocks, the prefix and five working copies of 7168 floats, three of the latent's 3584.
    assert bytes_per_token(config) == 4 * ((1 + 8 + 5) * 7168 + 3 * 3584 + 896)
    assert 8.5e9 < fixed_bytes(config) < 9e9
