import pytest

from k3quant.errors import UsageError
from k3quant.hub.reference import Reference, is_reference, parse_reference

COMMIT = "f831ab66814297da540d832a5235f8e904f29d06"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("hf://a/b@v1", Reference("a/b", "v1"), id="scheme-and-revision"),
        pytest.param("a/b", Reference("a/b", "main"), id="name-alone"),
        pytest.param("a/b.c-D_1", Reference("a/b.c-D_1"), id="all-characters"),
        pytest.param("a/b@refs/pr/3", Reference("a/b", "refs/pr/3"), id="pull-request"),
        pytest.param(f"a/b@{COMMIT}", Reference("a/b", COMMIT), id="commit"),
    ],
)
def test_parse_reference(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "b", "a/b/c", "hf://", "a/b@", "a/ b", "../b", "a/..", "http://a/b", "a/b@x y", "a/b?x"],
)
def test_parse_reference_refuses_other_texts(text: str) -> None:
    with pytest.raises(UsageError, match="expected `hf://org/name@revision`"):
        parse_reference(text)


def test_revision_is_quoted_as_one_part_of_a_path() -> None:
    path = Reference("a/b", "refs/pr/3").file_path("x y/z.bin")
    assert path == "/a/b/resolve/refs%2Fpr%2F3/x%20y/z.bin"


def test_only_a_commit_is_pinned() -> None:
    assert Reference("a/b", COMMIT).is_pinned
    assert not Reference("a/b", COMMIT[:12]).is_pinned


def test_only_the_scheme_makes_a_place_remote() -> None:
    assert is_reference("hf://a/b")
    assert not is_reference("a/b")
