import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from k3quant.errors import ExitCode, IncompleteError, RefusedError
from k3quant.eval.perplexity import evaluate
from k3quant.eval.settings import EvalSettings

COMMAND = "from k3quant.cli.main import app; app()"
UNLIKE = ("seconds", "bytes_read", "resumed_after")


def _summary(result):
    return {key: value for key, value in result.to_json().items() if key not in UNLIKE}


def _kill_after(words, state, layer):
    """Run the command line until a layer is on the disk, then kill it."""
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until:
        done = [int(path.stem[-3:]) for path in state.glob("pass-0-layer-*.safetensors")]
        if done and max(done) >= layer:
            break
        assert child.poll() is None, child.stderr.read().decode()
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stderr.close()


@pytest.mark.parametrize(
    ("with_reference", "layer"),
    [(False, 0), (False, 5), (True, 2), (True, 6)],
    ids=["alone-early", "alone-late", "compared-early", "compared-late"],
)
def test_a_killed_walk_goes_on_and_gives_the_same_numbers(
    nano, tmp_path, write_ids, some_ids, with_reference, layer
):
    torch.set_num_threads(1)
    path, state = write_ids(some_ids(2000).tolist(), some_ids(5).tolist()), tmp_path / "state"
    reference = nano if with_reference else None
    settings = EvalSettings(ctx=512, noise_floor=with_reference)
    words = ["eval", nano, "--tokens", path, "--state", state]
    if with_reference:
        words += ["--reference", nano, "--noise-floor"]
    _kill_after(words, state, layer)
    resumed = evaluate(nano, tokens=path, reference=reference, settings=settings, state=state)
    # A kill between a layer's file and its line in the journal leaves the layer before.
    assert layer - 1 <= (-1 if resumed.resumed_after is None else resumed.resumed_after) < 9
    whole = evaluate(nano, tokens=path, reference=reference, settings=settings)
    assert whole.resumed_after is None
    assert resumed.nll.tolist() == whole.nll.tolist()
    assert _summary(resumed) == _summary(whole)
    # Only the scores are kept; a third run takes them as they are.
    assert [path.name for path in state.glob("*.safetensors")] == ["pass-0.safetensors"]
    again = evaluate(nano, tokens=path, reference=reference, settings=settings, state=state)
    assert _summary(again) == _summary(whole)
    assert again.bytes_read == 0


class _BrokenOffError(Exception):
    pass


class _Stop:
    """A progress that breaks off after some layers."""

    def __init__(self, layers):
        self.left = layers

    def start(self, label, total, unit):
        self.total = total

    def advance(self, amount):
        self.left -= amount
        if self.left < 0:
            raise _BrokenOffError

    def note(self, text):
        pass


@pytest.mark.parametrize("layers", [3, 8, 12, 26])
def test_several_passes_with_states_of_their_own(
    oracle, write_ids, some_ids, tmp_path, monkeypatch, layers
):
    one_by_one = lambda windows, config, **_: ([window] for window in windows)  # noqa: E731
    monkeypatch.setattr("k3quant.eval.perplexity.plan_passes", one_by_one)
    path = write_ids(some_ids(60).tolist())
    asked = {"tokens": path, "settings": EvalSettings(ctx=24), "reference": oracle}
    files = {name: tmp_path / f"{name}.safetensors" for name in ("whole", "parts")}
    whole = evaluate(oracle, **asked, save_hidden=files["whole"])
    state = tmp_path / "state"
    for stop in (layers, layers + 20):
        with pytest.raises(_BrokenOffError):
            evaluate(oracle, **asked, state=state, save_hidden=files["parts"], progress=_Stop(stop))
        assert not files["parts"].exists()
    parts = evaluate(oracle, **asked, state=state, save_hidden=files["parts"])
    assert _summary(parts) == _summary(whole)
    assert files["parts"].read_bytes() == files["whole"].read_bytes()


@pytest.fixture
def begun(oracle, write_ids, some_ids, tmp_path):
    """Return what was asked, and the folder with the state after two layers."""
    asked = {"tokens": write_ids(some_ids(60).tolist()), "settings": EvalSettings(ctx=24)}
    with pytest.raises(_BrokenOffError):
        evaluate(oracle, **asked, state=tmp_path / "state", progress=_Stop(2))
    return asked, tmp_path / "state"


@pytest.mark.parametrize(
    "change",
    [{"ctx": 20}, {"ctx": 24, "dtype": "bfloat16"}, {"ctx": 24, "stride": 12}],
    ids=["context", "dtype", "stride"],
)
def test_another_option_is_refused(oracle, begun, change):
    asked, state = begun
    with pytest.raises(RefusedError, match="expected the parameters it was started with") as caught:
        evaluate(oracle, **asked | {"settings": EvalSettings(**change)}, state=state)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_another_text_is_refused(oracle, begun, write_ids):
    asked, state = begun
    with pytest.raises(RefusedError, match="expected the parameters it was started with"):
        evaluate(oracle, **asked | {"tokens": write_ids([1, 2, 3])}, state=state)


def test_a_reference_that_joins_is_refused(oracle, begun):
    asked, state = begun
    with pytest.raises(RefusedError, match="expected the source it was started with"):
        evaluate(oracle, **asked, reference=oracle, state=state)


def test_a_changed_checkpoint_is_refused(oracle, copy_of, edit_tensor, begun):
    asked, state = begun
    folder = copy_of(oracle)
    edit_tensor(folder, "language_model.lm_head.weight", lambda weight: 2 * weight)
    with pytest.raises(RefusedError, match="got another or changed one"):
        evaluate(folder, **asked, state=state)


def test_a_state_with_a_file_gone_is_incomplete(oracle, begun):
    asked, state = begun
    for path in state.glob("pass-0-candidate-block-*"):
        path.unlink()
    with pytest.raises(IncompleteError, match="expected pass-0-candidate-block-0"):
        evaluate(oracle, **asked, state=state)


def test_the_journal_names_each_layer_after_its_file(begun):
    _, state = begun
    lines = [
        json.loads(line) for line in (state / ".k3quant-journal.jsonl").read_text().splitlines()
    ]
    assert lines[0]["command"] == "eval"
    layers = [line["details"]["layer"] for line in lines[1:] if "layer" in line["details"]]
    assert layers == [0, 1]
    assert (state / "pass-0-layer-001.safetensors").exists()
    assert not (state / "pass-0-layer-000.safetensors").exists()
