from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from threading import Event, Thread
from time import monotonic

import pytest

from k3quant.errors import ResourceError
from k3quant.hub.patience import (
    WORTHWHILE_BYTES,
    Patience,
    RetryPolicy,
    StoppedError,
    TransientError,
    retry_after,
)

FAULT = TransientError("HTTP 503")


def patience(**policy: float) -> Patience:
    settings = {"attempts": 3, "first_wait": 0.0} | policy
    return Patience(RetryPolicy(**settings), "http://hub/x: expected an answer", Event())  # type: ignore[arg-type]


def test_faults_in_a_row_are_counted() -> None:
    waiting = patience()
    waiting.wait_after(FAULT)
    waiting.wait_after(FAULT)
    with pytest.raises(ResourceError) as caught:
        waiting.wait_after(FAULT)
    assert caught.value.message == (
        "http://hub/x: expected an answer, got HTTP 503, 3 times in a row"
    )


def test_worthwhile_progress_starts_the_count_again() -> None:
    waiting = patience()
    for _ in range(20):
        waiting.wait_after(FAULT)
        waiting.progressed(WORTHWHILE_BYTES)


def test_a_byte_now_and_then_does_not() -> None:
    waiting = patience()
    for _ in range(2):
        waiting.wait_after(FAULT)
        waiting.progressed(WORTHWHILE_BYTES - 1)
    with pytest.raises(ResourceError, match="3 times in a row"):
        waiting.wait_after(FAULT)


def test_wait_that_the_server_asks_for_is_kept() -> None:
    waiting = patience()
    began = monotonic()
    waiting.wait_after(TransientError("HTTP 429", wait=0.2))
    assert monotonic() - began >= 0.2


def test_too_long_a_wait_is_a_fault() -> None:
    with pytest.raises(ResourceError, match=r"HTTP 429 and a wait of 7200 s") as caught:
        patience().wait_after(TransientError("HTTP 429", wait=7200))
    assert "in 120 minutes" in caught.value.hint


def test_stop_ends_a_wait() -> None:
    stop = Event()
    waiting = Patience(RetryPolicy(first_wait=60), "x", stop)
    Thread(target=lambda: (stop.wait(0.05), stop.set())).start()
    began = monotonic()
    with pytest.raises(StoppedError):
        waiting.wait_after(TransientError("silence", wait=60))
    assert monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        pytest.param("7", 7, 7, id="seconds"),
        pytest.param("0", 0, 0, id="zero"),
        pytest.param("Thu, 01 Jan 2015 00:00:00 GMT", 0, 0, id="date-past"),
        pytest.param("Thu, 01 Jan 2015 00:00:00 -0000", 0, 0, id="date-without-zone"),
    ],
)
def test_retry_after(text: str, low: float, high: float) -> None:
    wait = retry_after({"retry-after": text})
    assert wait is not None
    assert low <= wait <= high


def test_retry_after_a_date_to_come() -> None:
    text = format_datetime(datetime.now(UTC) + timedelta(hours=1))
    wait = retry_after({"retry-after": text})
    assert wait is not None
    assert 3590 <= wait <= 3600


@pytest.mark.parametrize("text", ["", "soon", "-3", "1.5x"])
def test_retry_after_that_says_nothing(text: str) -> None:
    assert retry_after({"retry-after": text}) is None


def test_retry_after_absent() -> None:
    assert retry_after({}) is None


def test_policy_refuses_no_attempts() -> None:
    with pytest.raises(ValueError, match="at least one attempt"):
        RetryPolicy(attempts=0)
