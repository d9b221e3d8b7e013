import json
import shutil

import pytest

from k3quant.errors import ExitCode, IncompleteError, SchemaError, StructureError, UsageError
from k3quant.models.conversation import read_conversation
from k3quant.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def goldens(data):
    return json.loads((data / "oracle" / "golden" / "tokenizer.json").read_text())["chat"]


@pytest.fixture
def write(tmp_path):
    def written(document):
        path = tmp_path / "chat.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return written


@pytest.mark.parametrize(
    "name",
    ["user_only", "system_user_low", "no_thinking", "multi_turn", "tools", "image"],
)
def test_a_file_gives_the_vendors_text_and_ids(goldens, write, oracle, name):
    document = dict(goldens[name]["kwargs"])
    document["messages"] = document.pop("conversation")
    conversation = read_conversation(write(document))
    assert conversation.render() == goldens[name]["rendered"]
    assert conversation.encode(Tokenizer.load(oracle)) == goldens[name]["ids"]


def test_a_list_is_its_messages(goldens, write):
    messages = goldens["user_only"]["kwargs"]["conversation"]
    assert read_conversation(write(messages)).render() == goldens["user_only"]["rendered"]


@pytest.mark.parametrize(
    ("document", "error", "said"),
    [
        pytest.param("[", StructureError, "expected JSON", id="json"),
        pytest.param({"tools": []}, SchemaError, "required field `messages`", id="no-messages"),
        pytest.param({"messages": [], "seed": 1}, SchemaError, "unknown field `seed`", id="key"),
        pytest.param("3", SchemaError, r"chat\.json: expected `messages`", id="number"),
    ],
)
def test_files_of_no_use_are_refused(write, document, error, said):
    with pytest.raises(error, match=said):
        read_conversation(write(document))


def test_a_missing_file_and_an_unknown_role_are_refused(tmp_path, write):
    with pytest.raises(IncompleteError):
        read_conversation(tmp_path / "none.json")
    with pytest.raises(UsageError, match="got `judge`") as caught:
        read_conversation(write([{"role": "judge", "content": "x"}])).render()
    assert caught.value.exit_code is ExitCode.USAGE


def test_relatives_share_the_ranks_but_not_the_control_tokens(oracle, tmp_path, write, goldens):
    folder = tmp_path / "relative"
    folder.mkdir()
    shutil.copy(oracle / "tiktoken.model", folder)
    config = json.loads((oracle / "tokenizer_config.json").read_text())
    names = {"354": "<|im_end|>", "355": "<|im_user|>", "356": "<|im_assistant|>"}
    for index, name in names.items():
        config["added_tokens_decoder"][index]["content"] = name
    del config["added_tokens_decoder"]["357"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    own, other = Tokenizer.load(oracle), Tokenizer.load(folder)
    text = "The attention residual <|im_end|> <|open|>"
    assert own.encode(text) == other.encode(text)
    assert 354 in other.encode(text, control_tokens=True)
    assert 355 not in other.encode(text, control_tokens=True)
    assert own.digest != other.digest
    conversation = read_conversation(write(goldens["user_only"]["kwargs"]["conversation"]))
    with pytest.raises(SchemaError, match=r"expected a control token `<\|open\|>`, got none"):
        conversation.encode(other)
