"""One Hub endpoint: its address, its credentials, and what its answers mean.

Tokens come from where huggingface_hub keeps them and go to the endpoint alone: they are dropped
when a redirect leaves it, and they are in no message.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any
from urllib.parse import urljoin, urlsplit

from k3quant import __version__
from k3quant.errors import IncompleteError, K3QuantError, ResourceError, UsageError
from k3quant.hub.patience import (
    TRANSIENT_STATUS,
    Patience,
    RetryPolicy,
    TransientError,
    retry_after,
)
from k3quant.hub.transport import Headers, Reply, Transport, origin_of

# A reconnect asks for the next byte on, so that it costs a round trip; waiting costs all the rest.
STALL_TIMEOUT = 30.0
_MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_JSON_BYTES = 256 << 20
_NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply after its redirects.

    Attributes:
        reply: Status, headers and body from where the redirects ended.
        url: That place.
        hub_headers: Headers of the endpoint's own answer, which speak of commit and digest.
    """

    reply: Reply
    url: str
    hub_headers: Headers


class XetAloneError(ResourceError):
    """A file is to be had through Xet and not over HTTP."""


class HubClient:
    """Asks one endpoint, patiently, from any number of threads.

    Args:
        endpoint: Base URL; None takes `HF_ENDPOINT` or the public Hub.
        stall_timeout: Seconds without bytes, or with next to none, that count as a stall.
        policy: How often and how long to try.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        stall_timeout: float = STALL_TIMEOUT,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.endpoint = (endpoint or _default_endpoint()).rstrip("/")
        self.stall_timeout = stall_timeout
        self.policy = policy or RetryPolicy()
        self.stop = Event()
        self._origin = origin_of(self.endpoint)
        self._transport = Transport(timeout=stall_timeout)
        self._headers = _request_headers()

    @property
    def own_headers(self) -> Headers:
        """What requests to the endpoint carry, its token too; for no other place."""
        return self._headers

    def close(self) -> None:
        """Close all connections and wake every wait."""
        self.stop.set()
        self._transport.close()

    def url(self, path: str) -> str:
        """Return the URL of a path below the endpoint."""
        return self.endpoint + path

    def get(self, url: str, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Ask once, following redirects; the status is the caller's to judge.

        Raises:
            TransientError: The server could not be reached, fell silent, or redirects in a circle.
        """
        hub_headers: Headers = {}
        for _ in range(_MAX_REDIRECTS):
            own = self._headers if origin_of(url) == self._origin else _PUBLIC_HEADERS
            reply = self._transport.get(url, {**own, **(headers or {})})
            if origin_of(url) == self._origin:
                # A second hop on the same origin, such as a renamed repository, adds to the first.
                hub_headers = {**hub_headers, **reply.headers}
            target = reply.headers.get("location")
            if reply.status not in _REDIRECTS or target is None:
                return Answer(reply, url, hub_headers)
            reply.close()
            url = urljoin(url, target)
        raise TransientError(f"{_MAX_REDIRECTS} redirects")

    def get_json(self, path: str, *, subject: str) -> Any:
        """Fetch a JSON document, all its pages where it is a list.

        Args:
            path: Path below the endpoint.
            subject: What is asked about, for messages.

        Raises:
            UsageError: The repository or revision does not exist, or access is denied.
            ResourceError: The server failed for as long as the policy allows.
            StoppedError: The work was told to stop meanwhile.
        """
        url: str | None = self.url(path)
        rows: list[Any] = []
        while url is not None:
            document, url = self._json_page(url, subject)
            if not isinstance(document, list):
                return document
            rows += document
        return rows

    def _json_page(self, url: str, subject: str) -> tuple[Any, str | None]:
        patience = Patience(self.policy, f"{plain(url)}: expected an answer", self.stop)
        while True:
            try:
                answer = self.get(url)
                self.check_status(answer, subject=subject, success={200})
                document = json.loads(answer.reply.read(_MAX_JSON_BYTES))
            except TransientError as fault:
                patience.wait_after(fault)
            except (ValueError, RecursionError):
                patience.wait_after(TransientError("no JSON"))
            else:
                following = _NEXT_PAGE.search(answer.reply.headers.get("link", ""))
                return document, urljoin(url, following[1]) if following else None

    def check_status(self, answer: Answer, *, subject: str, success: set[int]) -> None:
        """Pass a success, raise everything else as what it means, with its connection closed.

        Args:
            answer: The answer.
            subject: What was asked about, for messages.
            success: Statuses that are fine.

        Raises:
            TransientError: Another try may help.
            UsageError: The repository or revision does not exist, or access is denied.
            IncompleteError: The file does not exist.
            XetAloneError: The file is offered through Xet and not over HTTP.
            ResourceError: Any other failure.
        """
        status, headers = answer.reply.status, answer.reply.headers
        if status in success:
            return
        answer.reply.close()
        if status in TRANSIENT_STATUS:
            raise TransientError(f"HTTP {status}", wait=retry_after(headers))
        if origin_of(answer.url) != self._origin:
            # A signed address that has run out; the endpoint gives a new one.
            raise TransientError(f"HTTP {status} from {urlsplit(answer.url).netloc}")
        if "x-xet-hash" in answer.hub_headers:
            raise XetAloneError(
                f"{plain(answer.url)}: expected the file over HTTP, got HTTP {status} and an offer "
                "of Xet alone",
                hint="install hf_xet and leave HF_HUB_DISABLE_XET unset, then run this again",
            )
        raise self._final_error(status, headers, answer.url, subject)

    def _final_error(self, status: int, headers: Headers, url: str, subject: str) -> K3QuantError:
        code = headers.get("x-error-code", "")
        where = f"{subject}: expected it at {self.endpoint}, got HTTP {status}"
        if code == "GatedRepo" or status == 403:
            hint = "the repository is gated: accept its terms on its page, then set HF_TOKEN"
            return UsageError(f"{where} (access denied)", hint=hint)
        if code == "RevisionNotFound":
            return UsageError(f"{where} (no such revision)", hint="name a branch, tag or commit")
        if code == "EntryNotFound":
            return IncompleteError(f"{where} (no such file)")
        if status in {401, 404} or code == "RepoNotFound":
            hint = "check the name, and HF_TOKEN: private ones need it, and a stale one is refused"
            return UsageError(f"{where} (no such repository, or not for you)", hint=hint)
        return ResourceError(f"{plain(url)}: expected an answer, got HTTP {status}")


def plain(url: str) -> str:
    """Return a URL without its query, where signed addresses keep their secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_PUBLIC_HEADERS = {"User-Agent": f"k3quant/{__version__}"}


def _request_headers() -> dict[str, str]:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UsageError(
            "HF_HUB_OFFLINE: expected the network to be allowed, got 1",
            hint="unset it, or check what is there with `k3quant download --offline`",
        )
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {**_PUBLIC_HEADERS, **({"Authorization": f"Bearer {token}"} if token else {})}


def _default_endpoint() -> str:
    from huggingface_hub import constants

    # Read now and not when huggingface_hub was imported.
    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
