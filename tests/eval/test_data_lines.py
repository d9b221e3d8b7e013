import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from k3quant.errors import (
    ExitCode,
    IncompleteError,
    K3QuantError,
    SchemaError,
    StructureError,
    UsageError,
)
from k3quant.eval.data_lines import read_lines
from k3quant.media.settings import VideoSettings, read_settings
from k3quant.models import chat
from k3quant.models.tokenizer import Tokenizer

MARK = chat.IMAGE_PLACEHOLDER
PICTURE = {"type": "image", "image": "rgb_70x45.png"}
ASK = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, PICTURE]}]


@pytest.fixture(scope="module")
def tokenizer(oracle):
    return Tokenizer.load(oracle)


@pytest.fixture(scope="module")
def settings(oracle):
    return read_settings(json.loads((oracle / "preprocessor_config.json").read_text()))


@pytest.fixture
def read(tmp_path, data, tokenizer, settings):
    """Write lines beside the golden pictures and read them."""
    for picture in (data / "oracle" / "golden").glob("*.png"):
        shutil.copy(picture, tmp_path)

    def write_and_read(*lines, settings=settings):
        path = tmp_path / "data.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts))
        return read_lines(path, tokenizer, settings=settings)

    return write_and_read


def _spelled(tokenizer, line):
    """Return a line's text with each medium's features as one."""
    once = ~line.is_media | np.append(True, ~line.is_media[:-1])
    return tokenizer.decode(line.ids[once].tolist())


def test_a_medium_is_framed_as_the_vendor_does(read, tokenizer, data):
    (line,) = read({"text": f"Seen: {MARK}.", "media": [PICTURE]})
    golden = json.loads((data / "oracle" / "golden" / "summary.json").read_text())
    frame = golden["image_processor"]["rgb_70x45"]
    assert _spelled(tokenizer, line) == f"Seen: {frame['prompt']}."
    assert int(line.is_media.sum()) == frame["num_tokens"]
    assert line.segments[0].num_tokens == frame["num_tokens"]


def test_the_text_is_scored_and_nothing_of_the_medium(read, tokenizer):
    (line,) = read({"text": f"Seen: {MARK}. Yes", "media": [PICTURE]})
    text = tokenizer.encode("Seen: "), tokenizer.encode(". Yes")
    assert line.ids[line.scored].tolist() == text[0][1:] + text[1]


def test_text_after_a_medium_that_comes_first_is_scored_whole(read, tokenizer):
    (line,) = read({"text": f"{MARK}a", "media": [PICTURE]})
    assert line.ids[line.scored].tolist() == tokenizer.encode("a")


def test_control_tokens_in_the_text_stay_text(read, tokenizer):
    (line,) = read({"text": "<|media_pad|> [BOS]"})
    assert line.ids.tolist() == tokenizer.encode("<|media_pad|> [BOS]")
    assert not line.is_media.any()


def test_of_a_conversation_the_answer_is_scored(read, tokenizer):
    (line,) = read({"messages": ASK, "answer": "a cat", "thinking": False})
    assert line.ids[line.scored].tolist() == tokenizer.encode("a cat")
    prompt = chat.render(ASK, thinking=False).replace(
        MARK, "<|media_begin|>image 70x45<|media_content|><|media_pad|><|media_end|>"
    )
    assert _spelled(tokenizer, line) == prompt + "a cat"


def test_a_conversation_without_images_has_the_vendors_ids(read, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    (line,) = read({"messages": messages, "answer": "", "thinking_effort": "low"})
    assert line.ids.tolist() == chat.encode(tokenizer, messages, thinking_effort="low")


def test_several_media_keep_their_order(read):
    other = {"type": "image", "image": "rgba_50x61.png"}
    (line,) = read({"text": f"{MARK}{MARK} or", "media": [PICTURE, other]})
    assert [segment.caption for segment in line.segments] == ["image 70x45", "image 50x61"]
    assert int(line.is_media.sum()) == 12


@pytest.fixture
def video(tmp_path):
    folder = tmp_path / "frames"
    folder.mkdir()
    for place in range(6):
        Image.new("RGB", (28, 28), (place, 0, 0)).save(folder / f"{place}.png")
    return {"type": "video", "video": "frames", "fps": 8}


@pytest.fixture
def with_video(settings):
    video = VideoSettings(
        sample_fps=8.0,
        temporal_merge_kernel_size=4,
        in_patch_limit_each_frame=48,
        in_patch_limit_video=None,
        max_num_frames_each_video=None,
    )
    return replace(settings, video=video)


def test_each_chunk_of_a_video_has_its_time_before_it(read, tokenizer, video, with_video):
    (line,) = read({"text": f"Seen: {MARK}.", "media": [video]}, settings=with_video)
    frame = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert _spelled(tokenizer, line) == f"Seen: 00:00:00.000{frame}00:00:00.500{frame}."
    scored = tokenizer.decode(line.ids[line.scored].tolist())
    assert "Seen: ".endswith(scored.removesuffix("."))


def test_text_that_would_merge_with_a_time_is_refused(read, video, with_video, monkeypatch):
    monkeypatch.setattr("k3quant.media.media.timestamp", lambda seconds: "e")
    read({"text": f"a{MARK}", "media": [video]}, settings=with_video)
    with pytest.raises(UsageError, match=r"line 1: .*same ids joined and apart, got `h` .* `e`"):
        read({"text": f"h{MARK}", "media": [video]}, settings=with_video)


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        pytest.param({"text": "x", "media": [PICTURE]}, SchemaError,
                     "media: expected 0 for as many placeholders in the text, got 1", id="no-mark"),
        pytest.param({"text": f"{MARK}{MARK}", "media": [PICTURE]}, SchemaError,
                     "media: expected 2 for as many placeholders in the text, got 1", id="no-pic"),
        pytest.param({"text": MARK, "media": [{"type": "image", "image": "none.png"}]},
                     IncompleteError, "none.png: expected a picture, got no such file", id="gone"),
        pytest.param({"text": MARK, "media": [{"type": "sound"}]}, SchemaError, "sound", id="kind"),
        pytest.param({"text": "x", "label": 1}, SchemaError, "unknown field `label`", id="key"),
        pytest.param({"messages": ASK}, SchemaError, "required field `answer`", id="no-answer"),
        pytest.param({"messages": [{"role": "judge", "content": ""}], "answer": ""}, UsageError,
                     "expected a role of .* got `judge`", id="role"),
        pytest.param([1, 2], SchemaError, "expected keys `text` and `media`", id="ids"),
        pytest.param("{", StructureError, "expected JSON", id="json"),
    ],
)  # fmt: skip
def test_lines_of_no_use_are_refused_by_number(read, line, error, said):
    with pytest.raises(error, match=f"^data.jsonl, line 3: .*{said}"):
        read({"text": "fine"}, "", line)


def test_pictures_of_no_use_name_their_line(read, tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    with pytest.raises(K3QuantError, match=r"line 1: .*dot\.png: expected a picture of") as caught:
        read({"text": MARK, "media": [{"type": "image", "image": "dot.png"}]})
    assert caught.value.exit_code is ExitCode.SCHEMA


def test_a_text_model_refuses_media(read):
    with pytest.raises(SchemaError, match="expected a checkpoint with a vision tower"):
        read({"text": MARK, "media": [PICTURE]}, settings=None)
