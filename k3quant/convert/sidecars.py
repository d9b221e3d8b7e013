"""Files beside the weights that an export copies: tokenizer, code, licence, chat form."""

from collections.abc import Container, Iterator

from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.join import SHARD_SUFFIX
from k3quant.checkpoint.reader import Checkpoint

# Digests and listings of the source say nothing true about an export.
_OF_THE_SOURCE = frozenset({INDEX_FILE, "SHA256SUMS", ".gitattributes"})


def sidecar_files(checkpoint: Checkpoint, *, replaced: Container[str]) -> Iterator[str]:
    """Yield the source files that are copied as they are.

    Args:
        checkpoint: The source.
        replaced: Files that the export writes itself.
    """
    for file, info in checkpoint.source.files.items():
        top = file.split("/")[0]
        if (
            info.regular
            and file not in replaced
            and file not in _OF_THE_SOURCE
            and not top.startswith((".", "k3quant."))
            and not file.endswith((SHARD_SUFFIX, ".partial", ".incomplete"))
        ):
            yield file
