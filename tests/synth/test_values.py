import numpy as np
import pytest

from k3quant.models.k3_config import read_config
from k3quant.models.k3_tensors import layer_tensors, tensors
from k3quant.synth.stream import Stream
from k3quant.synth.values import values_of


@pytest.fixture(scope="module")
def config(k3_config):
    return read_config(k3_config)


def _spec(config, layer, role, part="weight"):
    packed = part != "weight"
    specs = layer_tensors(config, layer, packed=packed)
    return next(s for s in specs if (s.role, s.part) == (role, part))


def _numbers(config, spec, count):
    raw = values_of(spec, config).fill(Stream.of(1, spec.name), 0, count)
    if spec.dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32) if spec.dtype == "F32" else raw


@pytest.mark.parametrize(
    ("role", "low", "high"),
    [("expert.w1", 110, 123), ("expert.w3", 110, 122), ("expert.w2", 119, 122)],
)
def test_scale_bytes_fill_the_range_that_was_read(config, role, low, high):
    numbers = _numbers(config, _spec(config, 1, role, "scale"), 100_000)
    assert np.unique(numbers).tolist() == list(range(low, high + 1))


def test_codes_are_uniform(config):
    numbers = _numbers(config, _spec(config, 1, "expert.w1", "packed"), 160_000)
    counts = np.bincount(np.concatenate([numbers & 15, numbers >> 4]), minlength=16)
    assert np.all(np.abs(counts - 20_000) < 700)  # five sigma


@pytest.mark.parametrize(
    ("layer", "role", "mean", "spread"),
    [
        pytest.param(1, "kda.q_proj", 0.0, 7168**-0.5, id="matrix"),
        pytest.param(1, "kda.q_conv1d", 0.0, 0.5, id="convolution"),
        pytest.param(3, "mla.q_b_proj", 0.0, 1536**-0.5, id="low rank"),
        pytest.param(1, "moe.gate", 0.0, 7168**-0.5, id="router"),
        pytest.param(1, "moe.bias", 0.0, 0.01, id="router bias"),
        pytest.param(1, "input_layernorm", 1.0, 0.05, id="norm"),
        pytest.param(1, "kda.o_norm", 1.0, 0.05, id="norm in float32"),
        pytest.param(1, "kda.dt_bias", -1.5, 3 / 12**0.5, id="decay bias"),
    ],
)
def test_other_values_have_mean_and_spread(config, layer, role, mean, spread):
    numbers = _numbers(config, _spec(config, layer, role), 40_000).astype(np.float64)
    assert numbers.mean() == pytest.approx(mean, abs=4 * spread / 200)
    assert numbers.std() == pytest.approx(spread, rel=0.03)
    assert np.isfinite(numbers).all()


def test_a_log_is_zero_beyond_the_heads(config):
    spec = _spec(config, 1, "kda.A_log")
    numbers = _numbers(config, spec, 128)
    assert np.all(numbers[96:] == 0.0)
    assert np.all((numbers[:96] > 0) & (numbers[:96] < 2.78))
    piece = values_of(spec, config).fill(Stream.of(1, spec.name), 90, 20).view(np.float32)
    assert piece.tolist() == numbers[90:110].tolist()


@pytest.mark.parametrize("first", [0, 1, 7, 4095])
@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("expert.w1", "packed"),
        ("expert.w2", "scale"),
        ("kda.q_proj", "weight"),
        ("kda.q_conv1d", "weight"),
    ],
)
def test_a_piece_is_a_piece_of_the_whole(config, role, part, first):
    spec = _spec(config, 1, role, part)
    values, stream = values_of(spec, config), Stream.of(9, spec.name)
    whole = values.fill(stream, 0, 5000)
    width = len(whole) // 5000
    piece = values.fill(stream, first, 300)
    assert piece.tobytes() == whole[first * width : (first + 300) * width].tobytes()


def test_every_tensor_of_the_model_has_values_of_its_dtype(config):
    seen = set()
    for spec in tensors(config):
        if (spec.role, spec.part) in seen:
            continue
        seen.add((spec.role, spec.part))
        width = {"BF16": 2, "F32": 4, "U8": 1}[spec.dtype]
        assert len(values_of(spec, config).fill(Stream.of(0, spec.name), 3, 10)) == 10 * width
    assert len(seen) > 50
