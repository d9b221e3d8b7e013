"""Kimi-K3's chat form: messages as elements between the control tokens open, close and separator.

`<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>` is one message. There is
no published grammar; what is not on record of the vendor's rendering is refused by name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import msgspec

from k3quant.errors import SchemaError, UsageError
from k3quant.models.tokenizer import Tokenizer

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
THINKING_EFFORTS = ("low", "high", "max")

_EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ROLES = ("system", "user", "assistant", "tool")
_ARGUMENT_TYPES = {str: "string", int: "number"}
_NOT_ON_RECORD = "how the vendor renders this is not on record"


class Control(StrEnum):
    """The control tokens that structure a conversation; all other text is plain."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END_OF_MSG = "<|end_of_msg|>"


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object with no keys but its own."""


class _TextPart(_Form, frozen=True, tag_field="type", tag="text"):
    text: str


class _ImagePart(_Form, frozen=True, tag_field="type", tag="image"):
    image: str


class _Function(_Form, frozen=True):
    name: str
    arguments: str


class _ToolCall(_Form, frozen=True, tag_field="type", tag="function"):
    id: str
    function: _Function


class _System(_Form, frozen=True, tag_field="role", tag="system"):
    content: str


class _User(_Form, frozen=True, tag_field="role", tag="user"):
    content: str | list[_TextPart | _ImagePart]


class _Assistant(_Form, frozen=True, tag_field="role", tag="assistant"):
    content: str
    reasoning_content: str = ""
    tool_calls: list[_ToolCall] = []


class _ToolResult(_Form, frozen=True, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str


_Message = _System | _User | _Assistant | _ToolResult


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = True,
    thinking_effort: str | None = None,
) -> str:
    """Render a conversation up to the opening of the assistant's next message.

    Args:
        messages: `role` and `content` each: `system`, `user` (text, or parts of text and image),
            `assistant` (with `reasoning_content`, `tool_calls`), `tool` (with `tool_call_id`).
        tools: Declarations of functions, as JSON objects.
        thinking: False opens the response instead of the thinking.
        thinking_effort: One of `THINKING_EFFORTS`, "max" where none is given.

    Returns:
        The text, control tokens spelled out; an image is `IMAGE_PLACEHOLDER`.

    Raises:
        UsageError: The conversation holds what the vendor's renderings on record do not show.

    Source: Kimi-K3 `encoding_k3.py`, by its output.
    """
    return "".join(
        conversation_pieces(
            messages, tools=tools, thinking=thinking, thinking_effort=thinking_effort
        )
    )


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = True,
    thinking_effort: str | None = None,
) -> list[int]:
    """Encode a conversation; control tokens inside anybody's text stay text.

    Args:
        tokenizer: The vocabulary, with the four tokens of `Control`.
        messages: As for `render`.
        tools: As for `render`.
        thinking: As for `render`.
        thinking_effort: As for `render`.

    Returns:
        The ids. An image is the plain text of its placeholder, as with the vendor's tokenizer;
        the image processor puts the media tokens there.

    Raises:
        UsageError: As for `render`, or pieces whose ids depend on whether they are joined.
        SchemaError: The vocabulary lacks a control token.
    """
    ids: list[int] = []
    pieces = conversation_pieces(
        messages, tools=tools, thinking=thinking, thinking_effort=thinking_effort
    )
    for is_control, run in groupby(pieces, key=lambda piece: isinstance(piece, Control)):
        if is_control:
            ids += [control_id(tokenizer, piece) for piece in run]
        else:
            ids += encode_run(tokenizer, list(run))
    return ids


def control_id(tokenizer: Tokenizer, token: str) -> int:
    """Return a control token's id.

    Raises:
        SchemaError: The vocabulary has none of that name.
    """
    if token not in tokenizer.specials:
        raise SchemaError(f"tokenizer: expected a control token `{token}`, got none of that name")
    return tokenizer.specials[token]


def encode_run(tokenizer: Tokenizer, parts: Sequence[str]) -> list[int]:
    """Encode texts that stand side by side, where joining them first changes nothing.

    Raises:
        UsageError: It would.
    """
    joined = tokenizer.encode("".join(parts))
    if joined != [index for part in parts for index in tokenizer.encode(part)]:
        shown = " + ".join(f"`{part[-20:]}`" for part in parts)
        raise UsageError(
            f"conversation: expected text parts with the same ids joined and apart, got {shown}",
            hint="whether the vendor joins them is not on record",
        )
    return joined


def image_paths(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what each image of a conversation names, in order.

    Raises:
        UsageError: The conversation holds keys or types that are not on record.
    """
    return [
        part.image
        for message in _typed(messages)
        if isinstance(message, _User) and not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, _ImagePart)
    ]


def conversation_pieces(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = True,
    thinking_effort: str | None = None,
) -> list[str]:
    """List the control tokens (`Control`) and texts (plain `str`) of a conversation, in order.

    Arguments and errors are those of `render`. An image is a piece of its own.
    """
    if not thinking and thinking_effort is not None:
        raise UsageError(f"thinking_effort: expected none without thinking, got {thinking_effort}")
    typed = _typed(messages)
    _check_sequence(typed, thinking=thinking)
    pieces: list[str] = []
    if tools:
        pieces += _message({"role": "system", "type": "tool-declare"}, [_declare(tools)])
    if thinking:
        effort = "max" if thinking_effort is None else thinking_effort
        pieces += _message({"role": "system", "type": "thinking-effort"}, [_invoke(effort)])
    for before, message in zip([None, *typed], typed, strict=False):
        pieces += _render_message(message, before=before)
    opening = _open("think" if thinking else "response", {})
    return [*pieces, *_open("message", {"role": "assistant"}), *opening]


def _typed(messages: Sequence[Mapping[str, Any]]) -> list[_Message]:
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") not in _ROLES:
            raise _unknown(f"message {number}", f"a role of {_ROLES}", message.get("role"))
    try:
        return msgspec.convert(messages, list[_Message])
    except msgspec.ValidationError as error:
        reason = str(error)[0].lower() + str(error)[1:]
        raise UsageError(
            f"conversation: expected only keys and types on record, got: {reason}",
            hint=_NOT_ON_RECORD,
        ) from error


def _check_sequence(messages: list[_Message], *, thinking: bool) -> None:
    """Refuse orders of messages that no rendering on record shows."""
    if not messages or not isinstance(messages[-1], _User | _ToolResult):
        last = messages[-1].__struct_config__.tag if messages else "no message"
        raise _unknown("last message", "one from user or tool", last)
    num_calls = 0
    for number, (message, after) in enumerate(zip(messages, [*messages[1:], None], strict=True)):
        subject = f"message {number}"
        if isinstance(message, _ToolResult):
            before = messages[number - 1] if number else None
            if not isinstance(before, _Assistant) or not before.tool_calls:
                raise _unknown(subject, "a tool's result right after its call", "it elsewhere")
        if not isinstance(message, _Assistant):
            continue
        if not thinking:
            raise _unknown(subject, "no assistant message without thinking", "one")
        if message.reasoning_content.isspace():
            raise _unknown(subject, "reasoning with text in it", "only whitespace")
        num_calls += len(message.tool_calls)
        if num_calls > 1:
            raise _unknown(subject, "one tool call a conversation", num_calls)
        for call in message.tool_calls:
            if not isinstance(after, _ToolResult) or after.tool_call_id != call.id:
                raise _unknown(subject, f"the result of `{call.id}` right after its call", "none")


def _render_message(message: _Message, *, before: _Message | None) -> list[str]:
    match message:
        case _System():
            return _message({"role": "system"}, [_text(message.content)])
        case _User():
            return _message({"role": "user"}, _user_parts(message.content))
        case _Assistant():
            body = _element("think", {}, [_text(message.reasoning_content)])
            body += _element("response", {}, [_text(message.content)])
            for call in message.tool_calls:
                body += _element("tools", {}, _render_call(call))
            return _message({"role": "assistant"}, body)
        case _ToolResult():
            assert isinstance(before, _Assistant)
            tool = before.tool_calls[0].function.name
            return _message({"role": "tool", "tool": tool, "index": "1"}, [_text(message.content)])


def _render_call(call: _ToolCall) -> list[str]:
    text = call.function.arguments
    try:
        arguments = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise _unknown(f"tool call `{call.id}`", "arguments in JSON", error) from error
    if not text.lstrip().startswith("{") or not arguments:
        raise _unknown(f"tool call `{call.id}`", "an object of arguments", text)
    if len({key for key, _ in arguments}) < len(arguments):
        raise _unknown(f"tool call `{call.id}`", "each argument once", text)
    body: list[str] = []
    for key, value in arguments:
        if type(value) not in _ARGUMENT_TYPES:
            raise _unknown(f"argument `{key}`", "a string or an integer", json.dumps(value))
        attributes = {"key": key, "type": _ARGUMENT_TYPES[type(value)]}
        body += _element("argument", attributes, [_text(str(value))])
    return _element("call", {"tool": call.function.name, "index": "1"}, body)


def _declare(tools: Sequence[Mapping[str, Any]]) -> str:
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _unknown("tools", "objects of type `function`", tool)
    try:
        text = json.dumps(
            tools, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"tools: expected JSON values, got `{error}`") from error
    if not text.isascii():
        raise _unknown("tools", "ASCII", next(char for char in text if not char.isascii()))
    return _TOOLS_TEXT.format(_text(text))


def _invoke(effort: str) -> str:
    if effort not in THINKING_EFFORTS:
        raise UsageError(f"thinking_effort: expected one of {THINKING_EFFORTS}, got `{effort}`")
    return _EFFORT_TEXT.format(effort)


def _message(attributes: Mapping[str, str], body: list[str]) -> list[str]:
    return [*_element("message", attributes, body), Control.END_OF_MSG]


def _element(tag: str, attributes: Mapping[str, str], body: list[str]) -> list[str]:
    return [*_open(tag, attributes), *body, Control.CLOSE, tag, Control.SEP]


def _open(tag: str, attributes: Mapping[str, str]) -> list[str]:
    pieces: list[str] = [Control.OPEN, tag]
    for name, value in attributes.items():
        if not _PLAIN_VALUE.fullmatch(value):
            raise _unknown(f"attribute `{name}`", "letters, digits and `_.-`", value)
        pieces += [f' {name}="', value, '"']
    return [*pieces, Control.SEP]


def _user_parts(content: str | list[_TextPart | _ImagePart]) -> list[str]:
    if isinstance(content, str):
        return [_text(content)]
    return [
        IMAGE_PLACEHOLDER if isinstance(part, _ImagePart) else _text(part.text) for part in content
    ]


def _text(text: str) -> str:
    if IMAGE_PLACEHOLDER in text:
        raise _unknown("text", "none of the image placeholder in it", "one")
    return text


def _unknown(subject: str, expected: str, got: object) -> UsageError:
    return UsageError(f"{subject}: expected {expected}, got `{got}`", hint=_NOT_ON_RECORD)
