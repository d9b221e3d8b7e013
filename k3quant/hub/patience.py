"""When to try again, how long to wait, and when to give up."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event

from k3quant.errors import ResourceError

TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})

# A connection that brought this much since the last fault was worth having: the count of faults
# starts again. Fewer bytes do not count, or a server that cuts after each byte is tried for ever.
WORTHWHILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long to try.

    Attributes:
        attempts: Tries in a row without progress before the fault is final.
        first_wait: Seconds before the second try; doubled each time.
        longest_wait: Most seconds between two tries where the server names none.
        longest_retry_after: Most seconds that a server may ask to wait; more is a fault.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 30.0
    longest_retry_after: float = 600.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_wait < 0:
            raise ValueError("retry policy: expected at least one attempt and a wait of 0 or more")


class StoppedError(Exception):
    """The work was told to stop."""


class TransientError(Exception):
    """One try failed in a way that another may mend.

    Attributes:
        text: What was got, for the message if it stays so.
        wait: Seconds the server asked to wait, None where it asked for none.
    """

    def __init__(self, text: str, *, wait: float | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.wait = wait


class Patience:
    """Counts the faults of one piece of work and waits between tries.

    Args:
        policy: How often and how long.
        subject: The URL, and what was expected of it, for the message.
        stop: Ends a wait early.
    """

    def __init__(self, policy: RetryPolicy, subject: str, stop: Event) -> None:
        self._policy = policy
        self._subject = subject
        self._stop = stop
        self._faults = 0
        self._bytes = 0

    def progressed(self, count: int) -> None:
        """Count bytes that arrived."""
        self._bytes += count
        if self._bytes >= WORTHWHILE_BYTES:
            self._faults = 0

    def wait_after(self, fault: TransientError) -> None:
        """Wait as long as a fault asks for.

        Raises:
            ResourceError: It was one fault too many, or the server asks for too long a wait.
            StoppedError: The work was told to stop meanwhile.
        """
        self._faults += 1
        self._bytes = 0
        policy = self._policy
        if self._faults >= policy.attempts:
            times = "once" if self._faults == 1 else f"{self._faults} times in a row"
            raise ResourceError(
                f"{self._subject}, got {fault.text}, {times}",
                hint="run the same command again later; what arrived is kept",
            ) from fault
        if fault.wait is not None and fault.wait > policy.longest_retry_after:
            raise ResourceError(
                f"{self._subject}, got {fault.text} and a wait of {fault.wait:.0f} s",
                hint=f"run the same command again in {fault.wait / 60:.0f} minutes",
            ) from fault
        wait = fault.wait
        if wait is None:
            longest = min(policy.first_wait * 2 ** (self._faults - 1), policy.longest_wait)
            wait = longest * random.uniform(0.5, 1.0)  # so that many connections spread out
        if self._stop.wait(wait):
            raise StoppedError


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read a `Retry-After` header, seconds or a date, as seconds from now; None without one.

    Args:
        headers: Header fields by name in lower case.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)
