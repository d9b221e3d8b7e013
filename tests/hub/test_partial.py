from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from k3quant.hub.partial import Partial, discard, partial_path, state_path


@dataclass
class Content:
    name: str = "f"
    size: int = 1000
    etag: str | None = "e"
    may_be_shared: bool = True

    def stream(self, begin: int, end: int) -> Generator[bytes, None, None]:
        yield b"x" * (end - begin)


def partial(tmp_path: Path, content: Content | None = None, **changes: object) -> Partial:
    settings = {"commit": "c", "piece_bytes": 300} | changes
    return Partial(tmp_path / "f", content or Content(), **settings)  # type: ignore[arg-type]


def begun(tmp_path: Path, *pieces: int, there: int = 1000) -> None:
    first = partial(tmp_path)
    partial_path(first.path).write_bytes(b"x" * there)
    for piece in pieces:
        first.done[piece] = True
    first.save()


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, 0), (1, 1), (299, 1), (300, 1), (301, 2), (1000, 4)]
)
def test_pieces_cover_the_file(tmp_path: Path, size: int, pieces: int) -> None:
    found = partial(tmp_path, Content(size=size))
    assert len(found.done) == pieces
    spans = [(found.begin_of(i), found.end_of(i)) for i in range(pieces)]
    assert sum(end - begin for begin, end in spans) == size


def test_state_survives(tmp_path: Path) -> None:
    begun(tmp_path, 0, 1, 3)
    found = partial(tmp_path)
    assert found.done == [True, True, False, True]
    assert found.done_bytes == 300 + 300 + 100


def test_pieces_keep_their_size_when_another_is_asked_for(tmp_path: Path) -> None:
    begun(tmp_path, 0, 1)
    found = partial(tmp_path, piece_bytes=64)
    assert (found.piece_bytes, found.done_bytes) == (300, 600)


@pytest.mark.parametrize(
    ("content", "commit", "kept"),
    [
        pytest.param(Content(), "c", True, id="same"),
        pytest.param(Content(), "other", True, id="same-bytes-at-another-commit"),
        pytest.param(Content(etag="other"), "c", False, id="other-bytes"),
        pytest.param(Content(size=999), "c", False, id="other-size"),
        pytest.param(Content(etag=None), "c", False, id="digest-no-longer-known"),
    ],
)
def test_state_of_other_bytes_is_not_used(
    tmp_path: Path, content: Content, commit: str, kept: bool
) -> None:
    begun(tmp_path, 0)
    assert any(partial(tmp_path, content, commit=commit).done) == kept


@pytest.mark.parametrize(("commit", "kept"), [("c", True), ("other", False)])
def test_without_a_digest_only_the_commit_tells(tmp_path: Path, commit: str, kept: bool) -> None:
    first = partial(tmp_path, Content(etag=None))
    partial_path(first.path).write_bytes(b"x" * 1000)
    first.done[0] = True
    first.save()
    assert any(partial(tmp_path, Content(etag=None), commit=commit).done) == kept


def test_pieces_beyond_the_end_of_the_file_did_not_arrive(tmp_path: Path) -> None:
    begun(tmp_path, 0, 1, 2, there=700)
    assert partial(tmp_path).done == [True, True, False, False]


def test_discard_removes_both_files_and_may_be_repeated(tmp_path: Path) -> None:
    begun(tmp_path, 0)
    discard(tmp_path / "f")
    discard(tmp_path / "f")
    assert not partial_path(tmp_path / "f").exists()
    assert not state_path(tmp_path / "f").exists()
