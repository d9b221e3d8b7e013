"""What is scored: ids of a text or a file, and the windows they are read in."""

from collections.abc import Sequence
from pathlib import Path

from k3quant.errors import IncompleteError, UsageError
from k3quant.eval.divergence import Subject
from k3quant.eval.settings import EvalSettings
from k3quant.eval.tokens import check_ids, digest_ids, encode_text, read_documents
from k3quant.eval.windows import Ids, Window, plan_windows
from k3quant.models.k3_config import K3Config
from k3quant.models.tokenizer import RANKS_FILE, Tokenizer


def read_subject(
    folder: Path, config: K3Config, *, text: Path | None, tokens: Path | None
) -> tuple[Subject, tuple[Ids, ...]]:
    """Read what a checkpoint is to score.

    Args:
        folder: The checkpoint's folder.
        config: Its config.
        text: A text, encoded with the checkpoint's own tokenizer.
        tokens: A file of ids instead, see `read_documents`.

    Raises:
        IncompleteError: Nothing to score, or a file is gone.
        SchemaError: An id is beyond the vocabulary.
    """
    tokenizer: Tokenizer | None = None
    if text is not None or (folder / RANKS_FILE).exists():
        tokenizer = Tokenizer.load(folder)
    if text is not None:
        assert tokenizer is not None
        documents, label = encode_text(text, tokenizer), text.name
    else:
        assert tokens is not None
        documents, label = read_documents(tokens), tokens.name
    check_ids(documents, vocab_size=config.vocab_size, label=label)
    if all(len(ids) < 2 for ids in documents):
        got = sum(len(ids) for ids in documents)
        raise IncompleteError(
            f"{label}: nothing to score: expected a document of at least 2 ids, got {got} ids in "
            f"{len(documents)} documents",
            hint="the first id of a document is never scored",
        )
    subject = Subject(
        label=str(folder),
        config=config,
        tokens_sha256=digest_ids(documents),
        tokenizer_sha256=tokenizer.digest if tokenizer else None,
    )
    return subject, documents


def windows_of(documents: Sequence[Ids], config: K3Config, settings: EvalSettings) -> list[Window]:
    """Plan the windows.

    Raises:
        UsageError: The config has no BOS, or not so long a context.
    """
    if settings.bos and config.bos_token_id is None:
        raise UsageError("bos: expected a bos_token_id in config.json, got none")
    limit = config.max_position_embeddings
    if limit is not None and settings.ctx + settings.bos > limit:
        raise UsageError(f"ctx: expected at most {limit - settings.bos}, got {settings.ctx}")
    bos = config.bos_token_id if settings.bos else None
    return list(plan_windows(documents, ctx=settings.ctx, stride=settings.step, bos=bos))
