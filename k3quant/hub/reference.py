"""How people name a repository: `hf://org/name@revision`, or without the `hf://`."""

import re
from dataclasses import dataclass
from urllib.parse import quote

from k3quant.errors import UsageError

SCHEME = "hf://"
DEFAULT_REVISION = "main"
_REFERENCE = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository and a branch, tag or commit of it."""

    repository: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which cannot move."""
        return is_commit(self.revision)

    def at(self, commit: str) -> "Reference":
        """Return the same repository at a commit."""
        return Reference(self.repository, commit)

    def api_path(self, tail: str = "") -> str:
        """Return the path of a question about the repository."""
        return f"/api/models/{self.repository}{tail}"

    def file_path(self, file: str) -> str:
        """Return the path under which the server gives a file."""
        return f"/{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(file)}"


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit hash."""
    return _COMMIT.fullmatch(revision) is not None


def is_reference(text: str) -> bool:
    """Return whether a place is spelled as one on the Hub, not as a local path."""
    return text.startswith(SCHEME)


def parse_reference(text: str, revision: str | None = None) -> Reference:
    """Parse `hf://org/name@revision`; the scheme and the revision may be left out.

    Args:
        text: The reference.
        revision: Revision where the text names none; None is `main`.

    Raises:
        UsageError: It is no such text.
    """
    if revision and "@" not in text:
        text = f"{text}@{revision}"
    match = _REFERENCE.fullmatch(text)
    if match is None or any(part in {".", ".."} for part in match[1].split("/")):
        raise UsageError(
            f"repository: expected `hf://org/name@revision`, got `{text}`",
            hint="for example `hf://moonshotai/Kimi-K3@main`",
        )
    return Reference(match[1], match[2] or DEFAULT_REVISION)
