"""Kimi-K3's tokenizer: byte-pair ranks, and 256 control tokens above them.

A line of `tiktoken.model` is `base64(bytes) rank`: `YQ== 97` gives the byte `a` the id 97. Text is
cut only where the pre-tokenizer splits whatever stands around, so a text of any length gets the ids
of the whole; the vendor's own cuts, at 400,000 and 25,000 characters, can change them.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiktoken

from k3quant.errors import (
    IncompleteError,
    ResourceError,
    SchemaError,
    StructureError,
    UsageError,
)

NUM_CONTROL_TOKENS = 256
RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# A text is encoded in chunks of about this many characters.
CHUNK_CHARS = 65_536
# Up to here a run without a place to cut is encoded, at a cost of under 0.7 GB.
MAX_UNBROKEN_CHARS = 4_194_304

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_TOKENIZER = "|".join(
    [
        r"[\p{Han}]+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Python's own `\s` also holds U+001C to U+001F, which are no White_Space to the pre-tokenizer.
_BLANK = r"\t\x0b\x0c \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Four classes that no version of Unicode moves. The apostrophe joins letters, so it is in none.
_DIGIT, _LETTER, _HAN = "0-9", "A-Za-z", "\u4e00-\u9fa5"
_PUNCTUATION = r"!-&(-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
# No alternative of the pre-tokenizer holds one of these pairs side by side, and none that ends
# before the cut looks beyond it: `\s+(?!\S)` alone looks ahead, and it never ends in a line break,
# because `\s*[\r\n]+` stands before it.
_CUT = re.compile(
    rf"(?<=[\r\n])(?=[^\r\n{_BLANK}])"
    rf"|(?<=[^\r\n{_BLANK}])(?=[{_BLANK}])"
    rf"|(?<=[{_DIGIT}])(?=[{_LETTER}{_HAN}{_PUNCTUATION}])"
    rf"|(?<=[{_LETTER}])(?=[{_DIGIT}{_HAN}{_PUNCTUATION}])"
    rf"|(?<=[{_HAN}])(?=[{_DIGIT}{_LETTER}{_PUNCTUATION}])"
    rf"|(?<=[{_PUNCTUATION}])(?=[{_DIGIT}{_HAN}])"
)
_LONG_BLANKS = re.compile(f"[{_BLANK}]{{{CHUNK_CHARS},}}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A vocabulary with its encoder: ids below `len(ranks)` are text, the 256 above are control.

    Two tokenizers are equal when their digests are.

    Attributes:
        ranks: Token bytes to id, dense from 0, every single byte among them.
        specials: Control token text to id; ids without a name are `<|reserved_token_ID|>`.
        bos_id: Id of the config's `bos_token`. Nothing is ever added to a text by itself.
        eos_id: Id of the config's `eos_token`; generation ends on another, `<|end_of_msg|>`.
        pad_id: Id of the config's `pad_token`.
        digest: SHA-256 over ranks and control tokens, in hex.
    """

    ranks: Mapping[bytes, int] = field(repr=False, compare=False)
    specials: Mapping[str, int] = field(repr=False, compare=False)
    bos_id: int
    eos_id: int
    pad_id: int
    digest: str
    _bpe: tiktoken.Encoding = field(repr=False, compare=False)
    _control_pattern: re.Pattern[str] = field(repr=False, compare=False)
    # One int object an id, shared by all ids of a text: 8 bytes a token instead of 40.
    _ids: tuple[int, ...] = field(repr=False, compare=False)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder.

        Args:
            folder: The checkpoint's folder. Other models share the ranks but not the control
                tokens, so both files must come from the same one.

        Returns:
            The tokenizer.

        Raises:
            IncompleteError: One of the two files is missing.
            StructureError: A rank line or the JSON is malformed.
            SchemaError: Control tokens overlap the ranks, each other, or leave the 256 slots.
            ResourceError: A file cannot be read.

        Source: Kimi-K3 `tokenization_kimi.py` (layout of the vocabulary, reserved names).
        """
        ranks = _parse_ranks(_read(folder / RANKS_FILE))
        config = _parse_config(_read(folder / CONFIG_FILE))
        specials = _control_tokens(config, first_id=len(ranks))
        longest_first = sorted(specials, key=len, reverse=True)
        return cls(
            ranks=ranks,
            specials=specials,
            bos_id=_role_id(config, "bos_token", specials=specials),
            eos_id=_role_id(config, "eos_token", specials=specials),
            pad_id=_role_id(config, "pad_token", specials=specials),
            digest=_digest(ranks, specials),
            _bpe=tiktoken.Encoding(
                "kimi-k3", pat_str=PRE_TOKENIZER, mergeable_ranks=ranks, special_tokens=specials
            ),
            _control_pattern=re.compile("|".join(map(re.escape, longest_first))),
            _ids=tuple(range(len(ranks) + NUM_CONTROL_TOKENS)),
        )

    @property
    def vocab_size(self) -> int:
        """Count ranks and control tokens together."""
        return len(self.ranks) + NUM_CONTROL_TOKENS

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Encode a text of any length, adding nothing to it.

        Args:
            text: The text; newlines are taken as they are.
            control_tokens: True turns the text of a control token into its id; otherwise it is
                text like any other.

        Returns:
            The ids; none for an empty text.

        Raises:
            StructureError: The text holds a lone surrogate, which UTF-8 cannot spell.
            ResourceError: An unbroken run is longer than `MAX_UNBROKEN_CHARS`.
        """
        if not text.isascii() and (surrogate := _SURROGATE.search(text)):
            raise StructureError(
                f"text: expected Unicode characters, got the lone surrogate"
                f" U+{ord(surrogate.group()):04X} at character {surrogate.start()}"
            )
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(text) if control_tokens else ():
            self._extend(ids, text[start : match.start()])
            ids.append(self.specials[match.group()])
            start = match.end()
        self._extend(ids, text[start:])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens as their text.

        Args:
            ids: Ids below `vocab_size`.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD, as with the vendor's tokenizer.

        Raises:
            UsageError: An id is outside the vocabulary.
        """
        last = self.vocab_size - 1
        for index in ids:
            if not 0 <= index <= last:
                raise UsageError(f"token ids: expected 0 to {last}, got {index}")
        return self._bpe.decode(ids)

    def _extend(self, ids: list[int], text: str) -> None:
        for chunk in cut_text(text):
            ids.extend(map(self._ids.__getitem__, self._encode_chunk(chunk)))

    def _encode_chunk(self, chunk: str) -> list[int]:
        if len(chunk) <= 2 * CHUNK_CHARS:
            return self._bpe.encode_ordinary(chunk)
        # The pre-tokenizer's one backtracking loop runs out of stack on about a million blanks; so
        # a long run of them is encoded without it, as the one piece that it would make of it.
        ids: list[int] = []
        start = 0
        for run in _LONG_BLANKS.finditer(chunk):
            end = run.end()
            if chunk[end : end + 1] in {"\r", "\n"}:
                continue  # belongs to `\s*[\r\n]+`, which needs no stack
            if end < len(chunk):
                end -= 1  # the last blank goes with what follows
            ids += self._bpe.encode_ordinary(chunk[start : run.start()])
            ids += _one_piece_bpe(self.ranks).encode_ordinary(chunk[run.start() : end])
            start = end
        return ids + self._bpe.encode_ordinary(chunk[start:])


def read_text(path: Path) -> str:
    """Read a text exactly: UTF-8, newlines and a byte-order mark kept as they are.

    Args:
        path: The file.

    Returns:
        Its characters.

    Raises:
        IncompleteError: The file is missing.
        StructureError: It is not UTF-8; the message names the byte.
        ResourceError: It cannot be read.
    """
    data = _read(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StructureError(
            f"{path.name}: expected UTF-8, got byte 0x{data[error.start]:02x} at {error.start}"
        ) from error


def cut_text(
    text: str, *, chunk_chars: int = CHUNK_CHARS, max_chars: int = MAX_UNBROKEN_CHARS
) -> Iterator[str]:
    """Cut a text where the pre-tokenizer splits it anyway.

    Args:
        text: Any text.
        chunk_chars: A chunk ends at the first safe cut after this many characters.
        max_chars: The longest chunk.

    Yields:
        Chunks, in order and without a gap; none for an empty text.

    Raises:
        ResourceError: No safe cut before `max_chars`.
    """
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + chunk_chars)
        end = cut.start() if cut else len(text)
        if end - start > max_chars:
            raise ResourceError(
                f"text: expected a break within {max_chars} characters, got {end - start} without"
                f" one that is sure to be safe, from character {start} on",
                hint="a cut inside the run would change its tokens; put a line break into it",
            )
        yield text[start:end]
        start = end


def _one_piece_bpe(ranks: Mapping[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "one-piece", pat_str="(?s:.+)", mergeable_ranks=dict(ranks), special_tokens={}
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteError(f"{path.name}: expected a file in {path.parent}, got none") from error
    except OSError as error:
        raise ResourceError(
            f"{path.name}: expected a readable file, got `{error.strerror}`"
        ) from error


def _parse_ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(data.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            encoded, digits = fields
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise _bad_rank(number, "`base64 rank`", line) from error
        if not token or not digits.isdigit():
            raise _bad_rank(number, "`base64 rank`", line)
        if token in ranks or rank in seen:
            raise _bad_rank(number, "a new token and a new rank", line)
        ranks[token] = rank
        seen.add(rank)
    for rank in range(len(ranks)):
        if rank not in seen:
            raise StructureError(f"{RANKS_FILE}: expected {len(ranks)} dense ranks, got no {rank}")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise StructureError(f"{RANKS_FILE}: expected every byte, got no 0x{byte:02x}")
    return ranks


def _bad_rank(number: int, expected: str, line: bytes) -> StructureError:
    shown = line[:60].decode("ascii", "backslashreplace")
    return StructureError(f"{RANKS_FILE} line {number}: expected {expected}, got `{shown}`")


def _parse_config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise StructureError(f"{CONFIG_FILE}: expected JSON, got `{error}`") from error
    if not isinstance(config, dict):
        raise SchemaError(f"{CONFIG_FILE}: expected an object, got {type(config).__name__}")
    return config


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise SchemaError(f"{CONFIG_FILE}: expected each key once, got `{key}` twice")
        table[key] = value
    return table


def _control_tokens(config: Mapping[str, Any], *, first_id: int) -> dict[str, int]:
    named = config.get("added_tokens_decoder")
    if not isinstance(named, dict) or not named:
        raise SchemaError(
            f"{CONFIG_FILE}: expected control tokens in `added_tokens_decoder`, got none"
        )
    slots = range(first_id, first_id + NUM_CONTROL_TOKENS)
    names = {index: f"<|reserved_token_{index}|>" for index in slots}
    for key, entry in named.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise SchemaError(
                f"{CONFIG_FILE} token {key}: expected a text `content`, got {content!r}"
            )
        if not key.isdecimal() or str(int(key)) != key or int(key) not in names:
            raise SchemaError(
                f"{CONFIG_FILE} token `{content}`: expected an id from {slots[0]} to {slots[-1]},"
                f" the {NUM_CONTROL_TOKENS} above the ranks, got {key}",
                hint=f"{RANKS_FILE} and {CONFIG_FILE} must come from the same checkpoint",
            )
        names[int(key)] = content
    specials: dict[str, int] = {}
    for index, name in names.items():
        if name in specials:
            raise SchemaError(
                f"{CONFIG_FILE} token `{name}`: expected one id, got {specials[name]} and {index}"
            )
        specials[name] = index
    return specials


def _role_id(config: Mapping[str, Any], role: str, *, specials: Mapping[str, int]) -> int:
    name = config.get(role)
    if isinstance(name, dict):
        name = name.get("content")
    if not isinstance(name, str) or name not in specials:
        raise SchemaError(f"{CONFIG_FILE} `{role}`: expected a control token, got {name!r}")
    return specials[name]


def _digest(ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> str:
    """Hash every token in the order of its id, each behind its length."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    tokens += [name.encode() for name in sorted(specials, key=specials.__getitem__)]
    digest = hashlib.sha256(len(ranks).to_bytes(4, "little"))
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()
