import numpy as np
import pytest

from k3quant.synth.stream import Stream, look_up

MASK = (1 << 64) - 1


def _word(stream: Stream, number: int) -> int:
    """SplitMix64's mix in Python's integers."""
    x = (stream.key + stream.step * number) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("first", [0, 5, 1 << 40])
def test_words_are_splitmix64_of_their_number(first):
    stream = Stream.of(3, "a.weight")
    words = np.empty(7, dtype=np.uint64)
    stream.fill(words, first)
    assert words.tolist() == [_word(stream, first + i) for i in range(7)]


def test_the_known_first_outputs_of_splitmix64():
    # seed 0 of the published generator: state steps by the golden gamma before each output
    words = np.empty(3, dtype=np.uint64)
    Stream(0, 0x9E3779B97F4A7C15).fill(words, 1)
    assert words.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_seed_and_name_both_count_and_steps_are_odd():
    streams = {Stream.of(seed, name) for seed in (0, 1) for name in ("a", "b", "1\na")}
    assert len(streams) == 6
    assert all(stream.step % 2 == 1 for stream in streams)
    assert Stream.of(0, "a") == Stream.of(0, "a")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_look_up_replaces_every_value(dtype):
    table = np.arange(np.iinfo(dtype).max + 1, dtype=dtype)[::-1].copy()
    values = np.array([0, 1, 200, 255], dtype=dtype)
    expected = table[values].copy()
    look_up(values, table)
    assert values.tolist() == expected.tolist()
