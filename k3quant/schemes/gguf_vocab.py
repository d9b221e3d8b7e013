"""A tiktoken vocabulary as GGUF stores one: tokens in GPT-2's spelling of bytes, and merges.

Each byte is one printable character: those of Latin-1 that print stand for themselves, the others
take the characters from U+0100 on, in order. Example: the token ` a` is `Ġa`, the byte 0x00 `Ā`.
"""

from collections.abc import Mapping
from enum import IntEnum

from k3quant.errors import SchemaError
from k3quant.models.tokenizer import Tokenizer
from k3quant.schemes.gguf_file import MetaField, ValueType


class TokenType(IntEnum):
    """What a token is, by its number in the file."""

    NORMAL = 1
    CONTROL = 3
    UNUSED = 5


def vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> list[MetaField]:
    """Return tokens, their types and the merges.

    Args:
        tokenizer: The checkpoint's tokenizer.
        vocab_size: Rows of the embedding; rows beyond the tokenizer become `[PAD<id>]`.

    Raises:
        SchemaError: The tokenizer has more ids than the embedding has rows.

    Source: ggml-org/llama.cpp, `src/llama-vocab.cpp`, pre-tokenizer `kimi-k2`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise SchemaError(
            f"vocab_size: expected at least the tokenizer's {tokenizer.vocab_size} ids, "
            f"got {vocab_size}"
        )
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, index in tokenizer.ranks.items():
        tokens[index], types[index] = spell_bytes(token), TokenType.NORMAL
    for name, index in tokenizer.specials.items():
        tokens[index], types[index] = name, TokenType.CONTROL
    return [
        MetaField("tokenizer.ggml.tokens", ValueType.STRING, tokens),
        MetaField("tokenizer.ggml.token_type", ValueType.I32, types),
        MetaField("tokenizer.ggml.merges", ValueType.STRING, merges(tokenizer.ranks)),
    ]


def spell_bytes(token: bytes) -> str:
    """Return a token with one printable character a byte.

    Source: openai/gpt-2, `src/encoder.py`, `bytes_to_unicode`.
    """
    return token.decode("latin-1").translate(_SPELLING)


def merges(ranks: Mapping[bytes, int]) -> list[str]:
    """Return the pair of tokens that each longer token is made of, in the order of ranks.

    A token is split by the tokens of lower rank only. One that they leave in more than two pieces
    has no merge: no encoder that works by pairs can produce it.
    """
    lines = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            pieces = split_token(token, ranks)
            if len(pieces) == 2:
                lines.append(" ".join(map(spell_bytes, pieces)))
    return lines


def split_token(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge a token's bytes, lowest rank first, as long as a rank below its own applies."""
    limit = ranks[token]
    pieces = [token[i : i + 1] for i in range(len(token))]
    while True:
        best, place = limit, -1
        for i in range(len(pieces) - 1):
            rank = ranks.get(pieces[i] + pieces[i + 1], limit)
            if rank < best:
                best, place = rank, i
        if place < 0:
            return pieces
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def _byte_spelling() -> dict[int, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: 0x100 + place for place, byte in enumerate(others)}


_SPELLING = _byte_spelling()
