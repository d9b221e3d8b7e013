import hashlib

import pytest

from k3quant.hub.digest import Expected, Mismatch, OtherHead, Proof, judge_bytes

DATA = b"some bytes of a file"
SHA = hashlib.sha256(DATA).hexdigest()
BLOB = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()


@pytest.mark.parametrize(
    ("known", "by"),
    [
        pytest.param({"sha256": SHA}, "sha256", id="sha256"),
        pytest.param({"sha256": SHA, "blob_id": "0" * 40}, "sha256", id="sha256-goes-first"),
        pytest.param({"blob_id": BLOB}, "git", id="git"),
        pytest.param({}, "size", id="nothing"),
    ],
)
def test_right_bytes(known: dict[str, str], by: str) -> None:
    assert judge_bytes(DATA, Expected(size=len(DATA), **known)) == Proof(SHA, by)  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [{"sha256": "0" * 64}, {"blob_id": "0" * 40}])
def test_wrong_bytes(known: dict[str, str]) -> None:
    verdict = judge_bytes(DATA, Expected(size=len(DATA), **known))  # type: ignore[arg-type]
    got = SHA if "sha256" in known else BLOB
    assert verdict == Mismatch(next(iter(known.values())), got)


@pytest.mark.parametrize("replaced", [0, 1, 7, len(DATA)])
def test_other_head(replaced: int) -> None:
    known = hashlib.sha256(b"HEAD" + DATA[replaced:]).hexdigest()
    other = OtherHead(head=b"HEAD", replaced=replaced, sha256=known)
    expected = Expected(size=len(DATA), other_head=other)
    assert judge_bytes(DATA, expected) == Proof(SHA, "source")
    if replaced < len(DATA):
        assert isinstance(judge_bytes(DATA[:-1] + b"?", expected), Mismatch)
