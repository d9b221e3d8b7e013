import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from k3quant.errors import UsageError
from k3quant.hub.patience import TransientError
from k3quant.hub.transport import Origin, Transport, origin_of


def body(transport: Transport, url: str) -> bytes:
    return transport.get(url, {}).read(1 << 20)


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport(timeout=1.0)
    yield transport
    transport.close()


class Recorder(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked, as a server or as a proxy."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = f"{self.path} {self.headers.get('Proxy-Authorization')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_CONNECT(self) -> None:
        self.server.connects.append((self.path, self.headers.get("Proxy-Authorization")))  # type: ignore[attr-defined]
        host, _, port = self.path.partition(":")
        with socket.create_connection((host, int(port))) as far:
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            threading.Thread(target=_pump, args=(far, self.connection), daemon=True).start()
            _pump(self.connection, far)

    def log_message(self, *_: object) -> None: ...


def _pump(near: socket.socket, far: socket.socket) -> None:
    try:
        while data := near.recv(65536):
            far.sendall(data)
        far.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def recorder() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.daemon_threads = True
    server.connects = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    both = tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(tmp_path / "key.pem"), "-out", str(both)],
        check=True, capture_output=True,
    )  # fmt: skip
    both.write_bytes(both.read_bytes() + (tmp_path / "key.pem").read_bytes())
    return both


@pytest.fixture
def secure(recorder: http.server.ThreadingHTTPServer, certificate: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"https://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a/x", Origin("http", "a", 80)),
        ("https://A/x?y", Origin("https", "a", 443)),
        ("http://a:8/x", Origin("http", "a", 8)),
    ],
)
def test_origin(url: str, origin: Origin) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize("url", ["ftp://a/", "a/b", "http://", ""])
def test_origin_of_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="expected an http or https URL"):
        origin_of(url)


def test_connection_is_kept(hub: Any, transport: Transport) -> None:
    for _ in range(5):
        body(transport, hub.url + "/api/models/test/repo")
    assert len({seen.connection for seen in hub.seen}) == 1


def test_connection_that_the_server_closed_is_replaced_unseen(
    hub: Any, transport: Transport
) -> None:
    hub.fault("README", no_keep_alive=True)
    body(transport, hub.url + "/test/repo/resolve/main/README.md")
    sleep(0.05)
    assert body(transport, hub.url + "/test/repo/resolve/main/README.md") == b"# toy\n"
    assert len({seen.connection for seen in hub.seen}) == 2


def test_unread_body_costs_the_connection(hub: Any, transport: Transport) -> None:
    transport.get(hub.url + "/test/repo/resolve/main/README.md", {}).close()
    body(transport, hub.url + "/test/repo/resolve/main/README.md")
    assert len({seen.connection for seen in hub.seen}) == 2


def test_body_beyond_the_limit(hub: Any, transport: Transport) -> None:
    reply = transport.get(hub.url + "/test/repo/resolve/main/tiktoken.model", {})
    with pytest.raises(TransientError, match="more than 100 bytes"):
        reply.read(100)


def test_short_body(hub: Any, transport: Transport) -> None:
    hub.fault("tiktoken", cut_at=500)
    with pytest.raises(TransientError, match="500 of 1200 bytes"):
        body(transport, hub.url + "/test/repo/resolve/main/tiktoken.model")


def test_silence(hub: Any, transport: Transport) -> None:
    hub.fault("tiktoken", stall_at=500)
    began = monotonic()
    with pytest.raises(TransientError, match="silence"):
        body(transport, hub.url + "/test/repo/resolve/main/tiktoken.model")
    assert 0.9 < monotonic() - began < 2


def test_close_wakes_a_read(hub: Any) -> None:
    transport = Transport(timeout=60)
    hub.fault("tiktoken", stall_at=500)
    threading.Thread(target=lambda: (sleep(0.2), transport.close())).start()
    began = monotonic()
    with pytest.raises(TransientError):
        body(transport, hub.url + "/test/repo/resolve/main/tiktoken.model")
    assert monotonic() - began < 2


def test_closed_transport_opens_nothing(hub: Any) -> None:
    transport = Transport(timeout=1)
    transport.close()
    with pytest.raises(TransientError, match="closed"):
        transport.get(hub.url, {})


def test_http_proxy_gets_the_whole_address(
    recorder: Any, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = recorder.server_address[1]
    monkeypatch.setenv("http_proxy", f"http://me:p%40ss@127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "other")
    text = body(transport, "http://hub.invalid/x?y=1").decode()
    assert text == "http://hub.invalid/x?y=1 Basic bWU6cEBzcw=="


def test_no_proxy_is_respected(
    hub: Any, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert body(transport, hub.url + "/test/repo/resolve/main/README.md") == b"# toy\n"


def test_other_kinds_of_proxy_are_refused(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UsageError, match="expected an http proxy in the environment"):
        transport.get("http://hub.invalid/", {})


def test_certificate_of_an_unknown_maker_is_refused(secure: str, transport: Transport) -> None:
    with pytest.raises(TransientError, match="a certificate that cannot be verified"):
        transport.get(secure + "/x", {})


def test_https_with_the_named_certificates(
    secure: str, certificate: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    assert body(transport, secure + "/x") == b"/x None"


def test_https_through_a_proxy(
    recorder: Any, secure: str, certificate: Path, transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("https_proxy", f"http://me:pw@127.0.0.1:{recorder.server_address[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert body(transport, secure + "/x") == b"/x None"
    ((target, credentials),) = recorder.connects
    assert target == secure.removeprefix("https://")
    assert credentials == "Basic bWU6cHc="
