"""`k3quant tokens`: what a text or a conversation is to the model."""

from pathlib import Path
from typing import Annotated

import typer

from k3quant.cli.options import JsonOpt, QuietOpt
from k3quant.cli.output import session


def tokens(
    text: Annotated[str | None, typer.Argument(help="The text.")] = None,
    chat: Annotated[
        Path | None,
        typer.Option("--chat", help="JSON conversation instead: messages, tools, thinking."),
    ] = None,
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", help="Checkpoint folder whose tokenizer is used.")
    ] = Path(),
    control: Annotated[
        bool, typer.Option("--control", help="Read control tokens such as <|open|> in the text.")
    ] = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Print the ids of a text or of a rendered conversation.

    Example: k3quant tokens "Hello, World!" --tokenizer ./kimi-k3
    """
    with session("tokens", json=json, quiet=quiet) as out:
        from k3quant.errors import UsageError
        from k3quant.models.conversation import read_conversation
        from k3quant.models.tokenizer import Tokenizer

        if (text is None) == (chat is None):
            raise UsageError("tokens: expected one of a text and --chat")
        if chat is not None and control:
            raise UsageError("tokens: expected --control with a text, got it with --chat")
        vocabulary = Tokenizer.load(tokenizer)
        if chat is not None:
            conversation = read_conversation(chat)
            rendered, ids = conversation.render(), conversation.encode(vocabulary)
        else:
            rendered = text or ""
            ids = vocabulary.encode(rendered, control_tokens=control)
        summary = {
            "ids": ids,
            "count": len(ids),
            "text": rendered,
            "tokenizer_sha256": vocabulary.digest,
        }
        out.done(summary, [" ".join(map(str, ids))])
