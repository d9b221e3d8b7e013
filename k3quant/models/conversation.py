"""A conversation from a JSON file: a list of messages, or an object with tools and options."""

from pathlib import Path
from typing import Any

import msgspec

from k3quant.errors import SchemaError, StructureError
from k3quant.models import chat
from k3quant.models.tokenizer import Tokenizer, read_text


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `chat.render` takes.

    Attributes:
        messages: The messages.
        tools: Declarations of functions.
        thinking: False opens the response instead of the thinking.
        thinking_effort: One of `chat.THINKING_EFFORTS`; None is the vendor's default.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    thinking: bool = True
    thinking_effort: str | None = None

    def render(self) -> str:
        """Render it, see `chat.render`.

        Raises:
            UsageError: It holds what is not on record.
        """
        return chat.render(
            self.messages,
            tools=self.tools,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
        )

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Encode it, see `chat.encode`.

        Raises:
            UsageError: It holds what is not on record.
            SchemaError: The vocabulary lacks a control token.
        """
        return chat.encode(
            tokenizer,
            self.messages,
            tools=self.tools,
            thinking=self.thinking,
            thinking_effort=self.thinking_effort,
        )


def read_conversation(path: Path) -> Conversation:
    """Read a conversation.

    Args:
        path: A JSON file with a list of messages, or with an object of `messages` and, if given,
            `tools`, `thinking` and `thinking_effort`.

    Raises:
        IncompleteError: The file is missing.
        StructureError: It is no JSON.
        SchemaError: It holds other keys.
    """
    try:
        document = msgspec.json.decode(read_text(path))
    except msgspec.DecodeError as error:
        raise StructureError(f"{path.name}: expected JSON, got: {error}") from error
    if isinstance(document, list):
        document = {"messages": document}
    try:
        return msgspec.convert(document, Conversation)
    except msgspec.ValidationError as error:
        reason = str(error)[0].lower() + str(error)[1:]
        raise SchemaError(
            f"{path.name}: expected `messages` and, if given, `tools`, `thinking` and "
            f"`thinking_effort`, got: {reason}"
        ) from error
