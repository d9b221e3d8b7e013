import base64
import json
import random
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import k3quant
from k3quant.errors import (
    IncompleteError,
    ResourceError,
    SchemaError,
    StructureError,
    UsageError,
)
from k3quant.models import tokenizer as module
from k3quant.models.tokenizer import PRE_TOKENIZER, Tokenizer, cut_text, read_text

_DATA = Path(__file__).parent.parent / "data"
_FOLDER = _DATA / "oracle" / "ckpt_k3"
_GOLDEN = json.loads((_DATA / "oracle" / "golden" / "tokenizer.json").read_text())
_NANO = Path(k3quant.__file__).parent / "nano"
_ENCODE_IDS = (
    "empty letter sentence contractions-digits blanks-newlines han-mixed accents-emoji "
    "control-text code upper-contractions letter-categories wide-blanks"
).split()
_golden_texts = pytest.mark.parametrize("case", _GOLDEN["encode"], ids=_ENCODE_IDS)

# Every class the pre-tokenizer knows, its borderline characters, and what Python classes otherwise.
_ALPHABET = (
    "aZsrR0 19\n\r\t\x0b\x1c\x1f\x85\xa0\u3000\u2028\u200b,.!-_'\u2019[`~\x00\x7f\xad\u180e\ufeff"
    "中国\u4e00\u9fa5\u9fff\U00020000\u3007\u3005\u32c0\u3001。\uff0c\uff1f\uff01\uff10\uff21"
    "éǅʰا٣Ⅷ½\u2170\u017f\u0301\u0e31\u30fc\u3041한😀"
)
_runs = st.lists(st.tuples(st.sampled_from(_ALPHABET), st.sampled_from([1, 1, 1, 2, 3, 7])))
_texts = _runs.map(lambda runs: "".join(char * count for char, count in runs))


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.load(_FOLDER)


@pytest.fixture(scope="module")
def nano():
    return Tokenizer.load(_NANO)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Load a vocabulary that merges any two bytes, so that nearly every moved border shows."""
    tokens = [bytes([a, b]) for a in range(256) for b in range(256)]
    random.Random(0).shuffle(tokens)
    folder = tmp_path_factory.mktemp("pairs")
    return Tokenizer.load(_write(folder, [bytes([byte]) for byte in range(256)] + tokens))


def _write(folder, tokens, *, named=None, config=None):
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(tokens)
    named = {first: "[BOS]", first + 1: "[EOS]", first + 255: "[PAD]"} if named is None else named
    document = {
        "added_tokens_decoder": {str(index): {"content": name} for index, name in named.items()},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "pad_token": "[PAD]",
    } | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder


@_golden_texts
def test_encode_gives_the_vendors_ids_with_control_tokens(tiny, case):
    assert tiny.encode(case["text"], control_tokens=True) == case["ids"]


@_golden_texts
def test_encode_gives_the_vendors_ids_with_control_tokens_as_text(tiny, case):
    assert tiny.encode(case["text"]) == case["ids_specials_as_text"]


@_golden_texts
def test_decode_gives_the_vendors_text(tiny, case):
    assert tiny.decode(case["ids"]) == case["decoded"]


def test_vocabulary_is_the_vendors(tiny):
    assert (tiny.vocab_size, tiny.bos_id, tiny.eos_id, tiny.pad_id) == (
        _GOLDEN["vocab_size"],
        _GOLDEN["bos_id"],
        _GOLDEN["eos_id"],
        _GOLDEN["pad_id"],
    )
    assert len(tiny.specials) == 256


def test_unnamed_control_tokens_are_reserved_by_their_id(tiny):
    assert tiny.specials["<|reserved_token_360|>"] == 360
    assert tiny.encode("a<|reserved_token_360|>b", control_tokens=True) == [97, 360, 98]


def test_nano_evaluation_text_encodes_to_its_golden_ids(nano):
    golden = load_file(_DATA / "nano" / "golden_ppl.safetensors")["input_ids"]
    text = read_text(_NANO / "eval.txt")
    np.testing.assert_array_equal(nano.encode(text), golden)
    assert nano.decode(golden.tolist()) == text


def test_control_tokens_inside_text_stay_text_unless_asked(nano):
    text = "before <|end_of_msg|>[BOS] after"
    assert max(nano.encode(text)) < len(nano.ranks)
    assert nano.decode(nano.encode(text)) == text
    asked = nano.encode(text, control_tokens=True)
    assert [index for index in asked if index >= len(nano.ranks)] == [2050, 2048]


def test_longest_control_token_wins(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    named = {256: "[BOS]", 257: "[EOS]", 258: "[PAD]", 259: "[EOS]+"}
    tokenizer = Tokenizer.load(_write(tmp_path, tokens, named=named))
    assert tokenizer.encode("[EOS]+[EOS]", control_tokens=True) == [259, 257]


def test_load_uses_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert Tokenizer.load(_FOLDER).encode("a") == [97]


def test_digest_tells_vocabularies_apart(tiny, nano, tmp_path):
    assert tiny.digest == "b6cf80ea563e89c48a24b5e2713b592f6a565f5518415e86abbb054b4252162f"
    assert Tokenizer.load(_FOLDER) == tiny
    assert tiny != nano
    shutil.copytree(_FOLDER, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|media_end|>", "<|media_stop|>"))
    renamed = Tokenizer.load(tmp_path)
    assert renamed.ranks == tiny.ranks
    assert renamed.digest != tiny.digest


# ---- cuts


def _pre_tokens(text):
    return regex.findall(PRE_TOKENIZER, text, flags=regex.V1)


@pytest.mark.parametrize(
    ("text", "pre_tokens"),
    [
        ("中国abc中。\u3001", ["中国", "abc", "中", "。\u3001"]),
        ("a中b", ["a", "中", "b"]),
        (" \u01c5ungla \u02b0a.b\u0301c", [" \u01c5ungla", " \u02b0a", ".b\u0301c"]),
        ("HTTPServer aBC", ["HTTPServer", " a", "BC"]),
        (
            "it's don't they'Re I've i'M we'LL he'd x'q",
            ["it's", " don't", " they'Re", " I've", " i'M", " we'LL", " he'd", " x", "'q"],
        ),
        ("1234567", ["123", "456", "7"]),
        ("\u0663\u0664\u0665\u00bd", ["\u0663\u0664\u0665", "\u00bd"]),
        (" ..!\n\n  +=x", [" ..!\n\n", " ", " +=", "x"]),
        ("a \n \r\n b", ["a", " \n \r\n", " b"]),
        ("a   b  ", ["a", "  ", " b", "  "]),
        ("x  1\t2", ["x", " ", " ", "1", "\t", "2"]),
    ],
    ids=(
        "han-runs han-inside-letters letters-with-one-lead upper-then-lower contractions "
        "three-digits foreign-digits marks-with-newlines newlines blanks single-blanks"
    ).split(),
)
def test_pre_tokenizer_splits(pairs, text, pre_tokens):
    assert _pre_tokens(text) == pre_tokens
    ids = [index for token in pre_tokens for index in pairs.encode(token)]
    assert pairs.encode(text) == ids


@settings(max_examples=400, deadline=None)
@given(text=_texts, chunk_chars=st.integers(1, 9))
def test_chunks_have_the_pre_tokens_of_the_whole(text, chunk_chars):
    chunks = list(cut_text(text, chunk_chars=chunk_chars))
    assert "".join(chunks) == text
    assert [token for chunk in chunks for token in _pre_tokens(chunk)] == _pre_tokens(text)


@settings(max_examples=400, deadline=None)
@given(text=_texts, chunk_chars=st.integers(1, 9))
def test_chunks_have_the_ids_of_the_whole(pairs, text, chunk_chars):
    chunks = cut_text(text, chunk_chars=chunk_chars)
    ids = [index for chunk in chunks for index in pairs._bpe.encode_ordinary(chunk)]
    assert ids == pairs._bpe.encode_ordinary(text)


@pytest.mark.parametrize(
    "text",
    ["x y", "x\ny", "x. y", "中。中", "a+b", "1a1", "a1", "中a", "中1", "})中"],
    ids=lambda text: text.encode("unicode_escape").decode(),
)
def test_cuts_are_found(text):
    assert len(list(cut_text(text, chunk_chars=1))) > 1


@pytest.mark.parametrize(
    "text",
    [
        "aaaa",
        "it's",
        "1234",
        "    ",
        "\n\n\n",
        "...\n\n",
        "中国",
        " \t\n\n",
        ".a",
        "\x1ca",
        "\u0301a",
    ],
    ids=lambda text: text.encode("unicode_escape").decode(),
)
def test_nothing_is_cut_that_may_be_one_pre_token(text):
    assert list(cut_text(text, chunk_chars=1)) == [text]


@pytest.fixture(scope="module")
def pairs_one_piece(pairs):
    return module._one_piece_bpe(pairs.ranks)


_blank_runs = st.tuples(st.sampled_from(" \t\n\r\u3000\x1ca.1中"), st.integers(1, 12))


@settings(max_examples=400, deadline=None)
@given(runs=st.lists(_blank_runs, min_size=1))
def test_isolated_blank_runs_have_the_ids_of_the_whole(pairs, pairs_one_piece, runs):
    text = "".join(char * count for char, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_CHARS", 2)
        patch.setattr(module, "_LONG_BLANKS", module.re.compile(f"[{module._BLANK}]{{4,}}"))
        patch.setattr(module, "_one_piece_bpe", lambda _: pairs_one_piece)
        assert pairs._encode_chunk(text) == pairs._bpe.encode_ordinary(text)


@pytest.mark.parametrize("size", [65_535, 65_537, 131_073, 300_001])
@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "aB",
        " ",
        "\t ",
        "\n",
        "\r\n",
        " \n",
        "1",
        "12a",
        "中",
        "中。",
        "!",
        "! ",
        "'s",
        "\u0301",
        "é",
    ],
    ids=lambda unit: unit.encode("unicode_escape").decode(),
)
def test_long_runs_have_the_ids_of_the_whole(nano, unit, size):
    text = "x" + (unit * size)[:size] + "y"
    assert nano.encode(text) == nano._bpe.encode_ordinary(text)


@pytest.mark.parametrize("shift", range(0, 40, 13))
def test_a_text_of_many_chunks_has_the_ids_of_the_whole(nano, shift):
    text = read_text(_NANO / "eval.txt")[shift:] * 4
    assert len(text) > 3 * module.CHUNK_CHARS
    assert nano.encode(text) == nano._bpe.encode_ordinary(text)


@pytest.mark.parametrize(
    "text",
    ["a", "aB", "1", "中", "!", " ", "\t", "\n", " \n"],
    ids=["letter", "letters", "digit", "han", "mark", "blank", "tab", "newline", "blank-newline"],
)
def test_a_million_of_one_class_ends_in_bounded_time(nano, text):
    text = (text * 1_000_000)[:1_000_000] + "."
    start = time.monotonic()
    ids = nano.encode(text)
    assert time.monotonic() - start < 30
    assert nano.decode(ids) == text


def test_a_million_blanks_are_the_piece_the_pre_tokenizer_makes_of_them(nano):
    blanks = " " * 1_000_000
    one_piece = module._one_piece_bpe(nano.ranks).encode_ordinary
    assert nano.encode("a" + blanks) == [97, *one_piece(blanks)]
    assert nano.encode(f"\n{blanks} z") == [10, *one_piece(blanks), *nano.encode(" z")]
    assert nano.encode(f"{blanks}\nz") == one_piece(f"{blanks}\n") + nano.encode("z")


def test_random_letters_in_one_run_end_in_bounded_time(nano):
    text = "".join(random.Random(0).choices("etaoinshrdlu", k=1_000_000))
    start = time.monotonic()
    assert nano.decode(nano.encode(text)) == text
    assert time.monotonic() - start < 30


def test_an_unbroken_run_beyond_the_bound_is_refused_with_its_place(nano):
    text = "word " * 20_000 + "a" * (module.MAX_UNBROKEN_CHARS + 1)
    with pytest.raises(
        ResourceError, match=r"expected a break within 4194304 .* character 65"
    ) as caught:
        nano.encode(text)
    assert caught.value.exit_code == 8
    assert "line break" in caught.value.hint


def test_ids_of_one_token_are_one_object(nano):
    index = len(nano.encode(" the"))
    assert index == 1
    ids = nano.encode(" the" * 100_000)
    assert ids[0] > 256
    assert all(other is ids[0] for other in ids)


# ---- texts


def test_lone_surrogate_is_refused(nano):
    with pytest.raises(StructureError, match=r"lone surrogate U\+D83D at character 2"):
        nano.encode("é \ud83d x")


def test_decode_shows_broken_utf8_as_replacement(nano):
    assert nano.decode([0xE4, 0xB8]) == "\ufffd"


@pytest.mark.parametrize("index", [-1, 2304, 2**40])
def test_decode_refuses_ids_outside_the_vocabulary(nano, index):
    with pytest.raises(UsageError, match=rf"expected 0 to 2303, got {index}"):
        nano.decode([1, index])


def test_read_text_keeps_every_character(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(path) == "\ufeffa\r\nb\rc\n"


def test_read_text_names_the_byte_that_is_no_utf8(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(StructureError, match=r"text\.txt: expected UTF-8, got byte 0xff at 3"):
        read_text(path)


def test_read_text_missing_file(tmp_path):
    with pytest.raises(IncompleteError, match=r"none.txt: expected a file in .*, got none"):
        read_text(tmp_path / "none.txt")


def test_read_text_folder_is_no_file(tmp_path):
    with pytest.raises(ResourceError, match="expected a readable file, got `Is a directory`"):
        read_text(tmp_path)


# ---- refusals of a vocabulary

_BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_load_missing_file_is_incomplete(tmp_path, name):
    (_write(tmp_path, _BYTES) / name).unlink()
    with pytest.raises(IncompleteError, match=f"{name}: expected a file in .*, got none") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"YWE=", "line 257: expected `base64 rank`, got `YWE=`"),
        (b"YWE= 256 1", "line 257: expected `base64 rank`, got `YWE= 256 1`"),
        (b"Y!E= 256", "line 257: expected `base64 rank`"),
        (b"YWE 256", "line 257: expected `base64 rank`"),
        (b"YWE= x", "line 257: expected `base64 rank`"),
        (b"YWE= -1", "line 257: expected `base64 rank`"),
        (b"YWE= 2_5", "line 257: expected `base64 rank`"),
        (b"YQ== 256", "line 257: expected a new token and a new rank, got `YQ== 256`"),
        (b"YWE= 97", "line 257: expected a new token and a new rank, got `YWE= 97`"),
        (b"YWE= 257", "expected 257 dense ranks, got no 256"),
        (b"\xff\xfe 256", r"line 257: expected `base64 rank`, got `\\xff\\xfe 256`"),
    ],
    ids=[
        "no-rank",
        "three-fields",
        "foreign-character",
        "short-padding",
        "rank-no-number",
        "rank-negative",
        "rank-underscore",
        "token-twice",
        "rank-twice",
        "gap",
        "binary",
    ],
)
def test_load_malformed_ranks_are_a_structure_fault(tmp_path, line, message):
    path = _write(tmp_path, _BYTES) / "tiktoken.model"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(StructureError, match=f"tiktoken.model:? ?{message}") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "tokens", [[], _BYTES[1:], _BYTES[:65] + _BYTES[66:]], ids=["empty", "x00", "A"]
)
def test_load_ranks_without_a_single_byte_are_refused(tmp_path, tokens):
    _write(tmp_path, tokens)
    with pytest.raises(
        StructureError, match=r"tiktoken\.model: expected every byte, got no 0x(00|41)"
    ):
        Tokenizer.load(tmp_path)


def test_load_ranks_in_any_order_and_with_blank_lines(tmp_path):
    path = _write(tmp_path, _BYTES) / "tiktoken.model"
    ordered = Tokenizer.load(tmp_path)
    path.write_bytes(b"\n".join(reversed(path.read_bytes().splitlines())) + b"\r\n\n")
    assert Tokenizer.load(tmp_path) == ordered


def test_load_shortened_ranks_do_not_fit_the_config(tmp_path):
    shutil.copytree(_FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(
        SchemaError, match=r"\[PAD\]`: expected an id from 351 to 606, .* got 607"
    ) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.exit_code == 6
    assert "same checkpoint" in caught.value.hint


_THREE = {256: "[BOS]", 257: "[EOS]", 258: "[PAD]"}


@pytest.mark.parametrize(
    ("named", "config", "message"),
    [
        (_THREE | {255: "[X]"}, {}, r"`\[X\]`: expected an id from 256 to 511, .* got 255"),
        (_THREE | {512: "[X]"}, {}, r"`\[X\]`: expected an id from 256 to 511, .* got 512"),
        (_THREE | {"0300": "[X]"}, {}, "expected an id from 256 to 511, .* got 0300"),
        (_THREE | {"x": "[X]"}, {}, "expected an id from 256 to 511, .* got x"),
        (_THREE | {300: "[EOS]"}, {}, r"token `\[EOS\]`: expected one id, got 257 and 300"),
        (_THREE | {300: "<|reserved_token_301|>"}, {}, "expected one id, got 300 and 301"),
        (_THREE | {300: ""}, {}, "token 300: expected a text `content`, got ''"),
        (_THREE | {300: 7}, {}, "token 300: expected a text `content`, got 7"),
        ({}, {}, "expected control tokens in `added_tokens_decoder`, got none"),
        (_THREE, {"added_tokens_decoder": [1]}, "expected control tokens in"),
        (_THREE, {"bos_token": None}, "`bos_token`: expected a control token, got None"),
        (_THREE, {"eos_token": "</s>"}, "`eos_token`: expected a control token, got '</s>'"),
        (_THREE, {"pad_token": {"content": 3}}, "`pad_token`: expected a control token, got 3"),
    ],
    ids=[
        "id-of-a-rank",
        "id-257-above",
        "id-with-zeros",
        "id-no-number",
        "name-twice",
        "name-of-a-reserved",
        "name-empty",
        "name-no-text",
        "none-named",
        "list-of-names",
        "no-bos",
        "foreign-eos",
        "pad-no-text",
    ],
)
def test_load_control_tokens_that_do_not_fit_are_a_schema_fault(tmp_path, named, config, message):
    _write(tmp_path, _BYTES, named=named, config=config)
    with pytest.raises(SchemaError, match=f"tokenizer_config.json.*{message}"):
        Tokenizer.load(tmp_path)


def test_load_config_with_one_id_twice_is_refused(tmp_path):
    path = _write(tmp_path, _BYTES) / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"257"', '"256"'))
    with pytest.raises(SchemaError, match="expected each key once, got `256` twice"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe{}", b""], ids=["cut-off", "no-utf8", "empty"])
def test_load_config_that_is_no_json_is_a_structure_fault(tmp_path, data):
    (_write(tmp_path, _BYTES) / "tokenizer_config.json").write_bytes(data)
    with pytest.raises(StructureError, match=r"tokenizer_config\.json: expected JSON, got"):
        Tokenizer.load(tmp_path)


def test_load_config_that_is_no_object_is_a_schema_fault(tmp_path):
    (_write(tmp_path, _BYTES) / "tokenizer_config.json").write_text("[]")
    with pytest.raises(SchemaError, match="expected an object, got list"):
        Tokenizer.load(tmp_path)
