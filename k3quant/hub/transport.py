"""HTTP as a download needs it: kept connections, one request at a time on each, no buffering.

`http.client` hands over what the socket holds in one copy; a general client parses it in 64 KiB
pieces, at five times the processor time. Redirects and further tries are decided by the caller.
"""

import http.client
import os
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from k3quant.errors import UsageError
from k3quant.hub.patience import TransientError

CHUNK = 1 << 18
_IDLE_KEPT = 32  # connections without work that are kept for each origin

Headers = Mapping[str, str]
"""Header fields of an answer, by name in lower case."""


class Origin(NamedTuple):
    """What a connection leads to; credentials never cross from one to another."""

    scheme: str
    host: str
    port: int


def origin_of(url: str) -> Origin:
    """Return a URL's origin.

    Raises:
        UsageError: It is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"address: expected an http or https URL, got `{url}`")
    return Origin(parts.scheme, parts.hostname, parts.port or _default_port(parts))


class Reply:
    """The answer to one request: read its body to the end, or close it."""

    def __init__(
        self,
        transport: "Transport",
        origin: Origin,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> None:
        self._transport = transport
        self._origin = origin
        self._connection = connection
        self._response = response
        self._released = False
        self.status = response.status
        self.headers: Headers = {name.lower(): value for name, value in response.headers.items()}

    def chunks(self) -> Iterator[bytes]:
        """Yield the body as it arrives; the connection is kept when it ended where it should.

        Raises:
            TransientError: The connection failed or fell silent.
        """
        whole = False
        try:
            while chunk := self._response.read1(CHUNK):
                yield chunk
            # A body that ends before its stated length leaves the rest in `length`.
            whole = not self._response.length and not self._response.will_close
            self._response.close()
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(_reason(error)) from error
        finally:
            self._release(reusable=whole)

    def read(self, limit: int) -> bytes:
        """Read a body of at most `limit` bytes.

        Raises:
            TransientError: The connection failed or fell silent, or the body is longer.
        """
        body = bytearray()
        chunks = self.chunks()
        for chunk in chunks:
            body += chunk
            if len(body) > limit:
                self.close()
                raise TransientError(f"more than {limit} bytes")
        stated = self.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) != len(body):
            raise TransientError(f"{len(body)} of {stated} bytes")
        return bytes(body)

    def close(self) -> None:
        """Drop the connection without reading the rest of the body."""
        self._release(reusable=False)

    def _release(self, *, reusable: bool) -> None:
        # Once only: a connection that was given back may be another thread's by now.
        if not self._released:
            self._released = True
            self._transport.give_back(self._origin, self._connection, reusable=reusable)


class Transport:
    """Connections to any number of origins, for use from any number of threads.

    Args:
        timeout: Seconds a connection may be silent before it counts as lost.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: defaultdict[Origin, list[http.client.HTTPConnection]] = defaultdict(list)
        self._busy: set[http.client.HTTPConnection] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    def get(self, url: str, headers: Headers) -> Reply:
        """Ask for a URL; follow nothing, repeat nothing.

        Raises:
            TransientError: The server could not be reached, or did not answer in HTTP or in time.
            UsageError: The URL is none of http or https.
        """
        origin = origin_of(url)
        connection = self._take_idle(origin)
        if connection is not None:
            # The server may have closed it meanwhile: that says nothing about the request.
            with suppress(TransientError):
                return self._ask(origin, connection, url, headers)
        return self._ask(origin, self._connect(origin), url, headers)

    def give_back(
        self, origin: Origin, connection: http.client.HTTPConnection, *, reusable: bool
    ) -> None:
        """Keep a connection for the next request, or close it."""
        with self._lock:
            self._busy.discard(connection)
            idle = self._idle[origin]
            if reusable and not self._closed and len(idle) < _IDLE_KEPT:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close every connection; reads that wait on one fail at once."""
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            # Only a shutdown wakes a thread that waits in a read; it closes the rest itself.
            sock: socket.socket | None = connection.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _take_idle(self, origin: Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle[origin]
            if not idle:
                return None
            connection = idle.pop()
            self._busy.add(connection)
            return connection

    def _ask(
        self,
        origin: Origin,
        connection: http.client.HTTPConnection,
        url: str,
        headers: Headers,
    ) -> Reply:
        parts = urlsplit(url)
        target = parts.path or "/"
        if parts.query:
            target += f"?{parts.query}"
        proxy = _proxy_for(origin)
        extra: dict[str, str] = {}
        if proxy is not None and origin.scheme == "http":
            target = f"http://{parts.netloc}{target}"
            extra = _proxy_credentials(proxy)
        try:
            connection.request("GET", target, headers={**headers, **extra})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.give_back(origin, connection, reusable=False)
            raise TransientError(_reason(error)) from error
        return Reply(self, origin, connection, response)

    def _connect(self, origin: Origin) -> http.client.HTTPConnection:
        proxy = _proxy_for(origin)
        host, port = (proxy.hostname, proxy.port) if proxy else (origin.host, origin.port)
        assert host is not None
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            context = self._tls_context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout, context=context
            )
            if proxy is not None:
                connection.set_tunnel(origin.host, origin.port, headers=_proxy_credentials(proxy))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        with self._lock:
            if self._closed:
                raise TransientError("a closed connection")
            self._busy.add(connection)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
                self._tls = ssl.create_default_context(cafile=bundle or None)
            return self._tls


def _proxy_for(origin: Origin) -> SplitResult | None:
    """Return the proxy that the environment names for an origin."""
    proxies = urllib.request.getproxies_environment()
    address = proxies.get(origin.scheme) or proxies.get("all")
    host = f"{origin.host}:{origin.port}"
    if not address or urllib.request.proxy_bypass(host):
        return None
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise UsageError(
            f"proxy: expected an http proxy in the environment, got scheme `{proxy.scheme}`"
        )
    return proxy


def _proxy_credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _default_port(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "silence"
    if isinstance(error, ConnectionRefusedError):
        return "a refused connection"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "a closed connection"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"a certificate that cannot be verified ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return "no address for the host"
    return f"{type(error).__name__}: {error}"
