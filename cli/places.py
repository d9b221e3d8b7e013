"""Where a command's files are: a folder here or a repository on the Hub."""

from pathlib import Path

from k3quant.checkpoint.folder import LocalFolder, Source


def open_source(place: str, revision: str | None = None) -> tuple[Source, str | None, str | None]:
    """Open a folder or `hf://owner/name@revision`.

    Args:
        place: Path or reference.
        revision: Revision where the reference has none.

    Returns:
        The files, and for a repository its name and resolved commit.

    Raises:
        K3QuantError: There is nothing to open.
    """
    if not place.startswith("hf://"):
        return LocalFolder(Path(place)), None, None
    from k3quant.hub.reference import parse_reference
    from k3quant.hub.source import HubSource

    source = HubSource(parse_reference(place, revision))
    return source, source.reference.repository, source.reference.revision
