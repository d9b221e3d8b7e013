import pytest

from k3quant.errors import SchemaError
from k3quant.models.tokenizer import Tokenizer
from k3quant.schemes.gguf_vocab import TokenType, merges, spell_bytes, split_token, vocabulary


@pytest.fixture(scope="module")
def tokenizer(nano):
    return Tokenizer.load(nano)


def _ranks(*longer: bytes) -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)] + list(longer)
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.mark.parametrize(
    ("token", "spelled"),
    [
        (b" a", "\u0120a"),
        (b"\n", "\u010a"),
        (b"\x00", "\u0100"),
        (b"\x7f", "\u0121"),
        (b"\xa0", "\u0142"),
        (b"\xad", "\u0143"),
        (b"\xc3\xa9", "\u00c3\u00a9"),
        (b"!~", "!~"),
    ],
    ids="blank newline zero delete no-break-space soft-hyphen high printable".split(),
)
def test_spell_bytes(token, spelled):
    assert spell_bytes(token) == spelled


def test_every_byte_has_its_own_printable_character():
    spelled = spell_bytes(bytes(range(256)))
    assert len(set(spelled)) == 256
    assert spelled.isprintable()
    assert not any(char.isspace() for char in spelled)


def test_split_takes_the_lowest_rank_first():
    ranks = _ranks(b"bc", b"ab", b"abc", b"abcd")
    assert split_token(b"abc", ranks) == [b"a", b"bc"]
    assert split_token(b"abcd", ranks) == [b"abc", b"d"]


def test_split_uses_lower_ranks_only():
    assert split_token(b"abc", _ranks(b"abc", b"ab")) == [b"a", b"b", b"c"]


def test_token_out_of_reach_has_no_merge():
    assert merges(_ranks(b"abc", b"ab")) == ["a b"]


def test_merges_stand_in_the_order_of_ranks():
    assert merges(_ranks(b" b", b"ab", b"a b")) == ["\u0120 b", "a b", "a \u0120b"]


def test_vocabulary_of_a_checkpoint(tokenizer):
    tokens, types, pairs = (f.value for f in vocabulary(tokenizer, vocab_size=2306))
    assert len(tokens) == len(types) == 2306
    assert tokens[2048:2051] == ["[BOS]", "[EOS]", "<|end_of_msg|>"]
    assert tokens[2304:] == ["[PAD2304]", "[PAD2305]"]
    assert types[0] == types[2047] == TokenType.NORMAL == 1
    assert types[2048] == types[2303] == TokenType.CONTROL == 3
    assert types[2304] == types[2305] == TokenType.UNUSED == 5
    assert len(pairs) == 2048 - 256


def test_each_merge_joins_to_the_token_of_its_rank(tokenizer):
    tokens, _, pairs = (f.value for f in vocabulary(tokenizer, vocab_size=2304))
    longer = [
        spell_bytes(token) for token, _ in sorted(tokenizer.ranks.items(), key=lambda t: t[1])
    ]
    assert [pair.replace(" ", "") for pair in pairs] == [t for t in longer if len(t) > 1]
    assert tokens[:2048] == longer


def test_tokenizer_larger_than_the_embedding_is_refused(tokenizer):
    with pytest.raises(SchemaError, match="vocab_size: expected at least the tokenizer's 2304 ids"):
        vocabulary(tokenizer, vocab_size=2303)
