"""Files that a server gives through Xet alone, as ranges of bytes like any other.

hf_xet does the transfer; resume, digests and the final name stay with the download. It repeats and
waits on its own account without saying so; a stream that brings nothing for too long is ended here.
"""

import importlib
import re
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

from k3quant.hub.client import Answer, HubClient
from k3quant.hub.patience import StoppedError, TransientError
from k3quant.hub.transport import origin_of

# One stream hands its bytes over in pieces as large as it likes; shorter streams bound them.
_STREAM_BYTES = 16 << 20
_LOOK_AGAIN = 0.2  # seconds between looks at whether the work was told to stop
_AUTH_LINK = re.compile(r'<([^>]+)>\s*;\s*rel="?xet-auth"?')
_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class XetOffer:
    """What a server says of a file in Xet: its hash there, its size, and where tokens are had."""

    hash: str
    size: int
    auth_url: str


@dataclass(frozen=True, slots=True)
class _Access:
    endpoint: str
    token: str
    expires: int


def offer_of(answer: Answer, size: int) -> XetOffer | None:
    """Read an offer from what the endpoint answered, None where there is none."""
    headers = answer.hub_headers
    digest = headers.get("x-xet-hash", "")
    link = _AUTH_LINK.search(headers.get("link", ""))
    place = link[1] if link else headers.get("x-xet-refresh-route")
    if _HASH.fullmatch(digest) is None or place is None:
        return None
    return XetOffer(digest, size, urljoin(answer.url, place))


def find_hf_xet() -> ModuleType | None:
    """Return hf_xet, None where it is not installed or switched off."""
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_XET:
        return None
    with suppress(ImportError):
        return importlib.import_module("hf_xet")
    return None


class XetReader:
    """Reads ranges of files in Xet, from any number of threads.

    Args:
        client: The endpoint that gives tokens; its stall time and stop are minded.
        hf_xet: The module.
    """

    def __init__(self, client: HubClient, hf_xet: ModuleType) -> None:
        self._client = client
        self._module = hf_xet
        self._lock = Lock()
        self._session: Any = None
        self._access: dict[str, _Access] = {}

    def stream(self, offer: XetOffer, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a range.

        Raises:
            TransientError: The transfer failed, fell silent or ended early.
            UsageError: Access is denied.
            IncompleteError: There are no tokens to be had.
            StoppedError: The work was told to stop meanwhile.
        """
        group = self._open_group(offer)
        info = self._module.XetFileInfo(offer.hash, offer.size)
        try:
            for first in range(begin, end, _STREAM_BYTES):
                last = min(first + _STREAM_BYTES, end)
                left = last - first
                for chunk in self._watched(group, info, first, last):
                    left -= len(chunk)
                    yield chunk
                if left:
                    raise TransientError(f"{last - first - left} of {last - first} bytes from Xet")
        except TransientError:
            with self._lock:
                self._access.pop(offer.auth_url, None)  # the next try asks for another token
            raise
        finally:
            group.abort()

    def _watched(self, group: Any, info: Any, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield what a thread receives, unless it receives nothing for too long."""
        received: SimpleQueue[bytes | Exception | None] = SimpleQueue()

        def receive() -> None:
            try:
                for chunk in group.download_stream(info, start=begin, end=end):
                    received.put(chunk)
                received.put(None)
            except Exception as error:  # hf_xet documents no classes
                received.put(error)

        thread = Thread(target=receive, name="xet", daemon=True)
        thread.start()
        silent_since = monotonic()
        while True:
            if self._client.stop.is_set():
                group.abort()
                raise StoppedError
            try:
                chunk = received.get(timeout=_LOOK_AGAIN)
            except Empty:
                if monotonic() - silent_since >= self._client.stall_timeout:
                    group.abort()
                    raise TransientError("silence from Xet") from None
                continue
            if chunk is None:
                thread.join()
                return
            if isinstance(chunk, Exception):
                raise TransientError(f"{type(chunk).__name__} from Xet: {chunk}") from chunk
            yield chunk
            silent_since = monotonic()

    def _open_group(self, offer: XetOffer) -> Any:
        access = self._token(offer.auth_url)
        with self._lock:
            if self._session is None:
                config = self._module.XetConfig().with_config("telemetry.enabled", False)
                self._session = self._module.XetSession(config)
        # A token's address may lie elsewhere; the credentials of the endpoint stay with it.
        same = origin_of(offer.auth_url) == origin_of(self._client.endpoint)
        headers = self._client.own_headers if same else {}
        try:
            return self._session.new_download_stream_group(
                endpoint=access.endpoint,
                token=access.token,
                token_expiry_unix_secs=access.expires,
                token_refresh_url=offer.auth_url,
                token_refresh_headers=dict(headers),
            )
        except Exception as error:  # hf_xet documents no classes
            raise TransientError(f"{type(error).__name__} from Xet: {error}") from error

    def _token(self, url: str) -> _Access:
        with self._lock:
            known = self._access.get(url)
        if known is not None:
            return known
        answer = self._client.get(url)
        self._client.check_status(answer, subject="Xet token", success={200})
        answer.reply.close()
        headers = answer.reply.headers
        expires = headers.get("x-xet-token-expiration", "")
        found = _Access(
            headers.get("x-xet-cas-url", ""),
            headers.get("x-xet-access-token", ""),
            int(expires) if expires.isdecimal() else 0,
        )
        if not (found.endpoint and found.token and found.expires):
            raise TransientError("a Xet token without its address, text or end")
        with self._lock:
            self._access[url] = found
        return found
