"""A small Hub on the loopback, which misbehaves on command and remembers what it was asked.

It speaks what downloads need: resolve a revision, list a tree in pages, give files whole or by
range, with or without a redirect to signed addresses on the same or on another origin.
"""

import argparse
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

Content = bytes | Path
FOREVER = 1 << 30
_CHUNK = 1 << 16


@dataclass(kw_only=True)
class Fault:
    """What to do wrong with the next `times` requests whose `METHOD path` holds `match`.

    Offsets count bytes of the body, except `flip_at`, an offset in the file.
    """

    match: str
    times: int = 1
    after: int = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_at: int | None = None
    stall_at: int | None = None
    bytes_per_second: float | None = None
    flip_at: int | None = None
    short_by: int = 0
    ignore_range: bool = False
    no_keep_alive: bool = False


@dataclass(kw_only=True)
class Seen:
    """One request, and what it was answered."""

    method: str
    path: str
    host: str
    range: str | None
    authorization: str | None
    status: int = 0
    sent: int = 0
    connection: int = 0


class Repo:
    """A repository: contents by path at each commit, and branches that can be moved."""

    def __init__(self, name: str, files: Mapping[str, Content]) -> None:
        self.name = name
        self.commits: dict[str, dict[str, Content]] = {}
        self.refs: dict[str, str] = {}
        self.commit(files)

    def commit(self, files: Mapping[str, Content], *, ref: str = "main") -> str:
        sha = hashlib.sha1(f"{self.name}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    @property
    def head(self) -> str:
        return self.refs["main"]


_DIGESTS: dict[tuple[str, int, int], str] = {}


def size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def sha256_of(content: Content) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    status = content.stat()
    key = (str(content), status.st_size, status.st_mtime_ns)
    if key not in _DIGESTS:
        with content.open("rb") as file:
            _DIGESTS[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _DIGESTS[key]


def blob_of(content: Content) -> str:
    data = content if isinstance(content, bytes) else content.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def in_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".model", ".bin"))


class HubServer:
    """Serves repositories on a free port until closed.

    Attributes:
        faults: What to do wrong, the first that matches counts.
        seen: Every request so far.
        redirect: `None`, `same` or `other`: where files in LFS are redirected to.
        token: Where set, what a request to the Hub itself must carry.
        page_size: Entries a page of a tree listing.
        extra_headers: Sent with what the Hub itself answers for a file.
        xet: Hashes of files that are to be had through Xet alone.
        xet_place: The address of the Xet store.
    """

    def __init__(self, *repos: Repo, port: int = 0, bytes_per_second: float | None = None) -> None:
        self.repos = {repo.name: repo for repo in repos}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.redirect: str | None = None
        self.token: str | None = None
        self.page_size = 1000
        self.extra_headers: dict[str, str] = {}
        self.xet: dict[str, str] = {}
        self.xet_place = ""
        self.expired_signatures: set[str] = set()
        self.signature = "s0"
        self.bytes_per_second = bytes_per_second
        self.lock = threading.Lock()
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.http = _Server(("127.0.0.1", port), handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def fault(self, match: str, **how: object) -> Fault:
        fault = Fault(match=match, **how)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def files_asked(self) -> list[Seen]:
        """Requests for contents, not for listings or redirects."""
        return [s for s in self.seen if "/api/" not in s.path and s.status in {200, 206}]

    def sent(self, name: str = "") -> int:
        """Bytes of content sent so far for files whose path ends in `name`."""
        return sum(s.sent for s in self.files_asked() if s.path.partition("?")[0].endswith(name))

    def fault_for(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are the point."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._route()

    def _route(self) -> None:
        hub = self.hub
        self.seen = Seen(
            method=self.command,
            path=self.path,
            host=self.headers.get("Host", ""),
            range=self.headers.get("Range"),
            authorization=self.headers.get("Authorization"),
            connection=self.client_address[1],
        )
        with hub.lock:
            hub.seen.append(self.seen)
        self.fault = hub.fault_for(f"{self.command} {unquote(self.path)}") or Fault(match="")
        if self.fault.status is not None:
            self._answer(self.fault.status, self.fault.body, self.fault.headers)
            return
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/cdn/"):
            self._cdn(path)
            return
        if hub.token is not None and self.seen.authorization != f"Bearer {hub.token}":
            self._error(401, "RepoNotFound")
            return
        match = re.match(r"/api/models/([^/]+/[^/]+)(?:/([a-z-]+)/([^/]+)(?:/(.*))?)?$", path)
        if match:
            self._api(match[1], match[2] or "revision", match[3] or "main")
            return
        match = re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path)
        if match:
            self._resolve(match[1], match[2], match[3])
            return
        self._error(404, "RepoNotFound")

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, Content]] | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._error(404, "RepoNotFound")
            return None
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            self._error(404, "RevisionNotFound")
            return None
        return sha, repo.commits[sha]

    def _api(self, name: str, question: str, revision: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        sha, files = found
        if question == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": name, "modelId": name, "sha": sha, "siblings": siblings})
            return
        if question == "xet-read-token":
            headers = {
                "X-Xet-Cas-Url": self.hub.xet_place,
                "X-Xet-Access-Token": "token of the test",
                "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
            }
            self._json({}, headers)
            return
        entries = _entries(files)
        if question == "paths-info":
            wanted = set(parse_qs(self._form).get("paths", []))
            self._json([entry for entry in entries if entry["path"] in wanted])
            return
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(entries):
            base = self.path.partition("?")[0]
            following = f"{self.hub.url}{base}?recursive=true&cursor={stop}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._json(entries[start:stop], headers)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        sha, files = found
        if path not in files:
            self._error(404, "EntryNotFound", {"X-Repo-Commit": sha})
            return
        content = files[path]
        lfs = in_lfs(path)
        etag = sha256_of(content) if lfs else blob_of(content)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        headers |= self.hub.extra_headers
        if lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size_of(content))}
            if path in self.hub.xet:
                headers["X-Xet-Hash"] = self.hub.xet[path]
                place = f"/api/models/{name}/xet-read-token/{sha}"
                headers["Link"] = f'<{place}>; rel="xet-auth"'
                self._answer(406, b"", headers)
                return
            if self.hub.redirect is not None:
                host = "localhost" if self.hub.redirect == "other" else "127.0.0.1"
                place = f"http://{host}:{self.hub.port}/cdn/{self.hub.signature}/{name}/{sha}"
                headers["Location"] = f"{place}/{quote(path)}?Signature=secret"
                self._answer(302, b"", headers)
                return
        self._content(content, headers)

    def _cdn(self, path: str) -> None:
        match = re.match(r"/cdn/([^/]+)/([^/]+/[^/]+)/([^/]+)/(.+)$", path)
        assert match is not None
        if match[1] in self.hub.expired_signatures:
            self._answer(403, b"expired", {})
            return
        content = self.hub.repos[match[2]].commits[match[3]][match[4]]
        # The real Hub's CDN says nothing of commits; a redirect on one origin is followed by its
        # own client only if the last answer does.
        headers = {"X-Repo-Commit": match[3]} if self.hub.redirect == "same" else {}
        headers["ETag"] = f'"{sha256_of(content)}"'
        self._content(content, headers)

    def _content(self, content: Content, headers: Mapping[str, str]) -> None:
        fault, size = self.fault, size_of(content)
        begin, end, status, extra = 0, size, 200, {}
        wanted = self.headers.get("Range")
        if wanted and not fault.ignore_range:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            assert match is not None, wanted
            begin = int(match[1])
            end = min(int(match[2]) + 1, size) if match[2] else size
            if begin >= size:
                self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            status = 206
            extra = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        end -= fault.short_by
        self.seen.status = status
        self.send_response(status)
        for key, value in {**headers, **extra, "Content-Length": str(end - begin)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self._send(content, begin, end)
        if fault.no_keep_alive:
            self.close_connection = True

    def _send(self, content: Content, begin: int, end: int) -> None:
        fault, offset = self.fault, begin
        rate = fault.bytes_per_second or self.hub.bytes_per_second
        plain = fault.cut_at is None and fault.stall_at is None and fault.flip_at is None
        self.wfile.flush()
        try:
            if isinstance(content, Path) and rate is None and plain:
                with content.open("rb") as file:
                    while offset < end:
                        sent = os.sendfile(
                            self.connection.fileno(), file.fileno(), offset, end - offset
                        )
                        offset += sent
                return
            stops = [begin + at for at in (fault.cut_at, fault.stall_at) if at is not None]
            stop = min([*stops, end])
            step = _CHUNK if rate is None else max(1, min(_CHUNK, int(rate / 50)))
            while offset < stop:
                data = _slice(content, offset, min(offset + step, stop))
                if fault.flip_at is not None and offset <= fault.flip_at < offset + len(data):
                    at = fault.flip_at - offset
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                self.seen.sent += len(data)  # before, so that whoever has them finds them counted
                self.wfile.write(data)
                offset += len(data)
                if rate is not None and self.hub.closing.wait(len(data) / rate):
                    break
            if fault.stall_at is not None and stop < end:
                self.hub.closing.wait(60)
            if stop < end:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.close_connection = True
        finally:
            if isinstance(content, Path) and rate is None and plain:
                self.seen.sent = offset - begin

    def _json(self, document: object, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self._answer(200, body, {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, **(headers or {})})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.seen.status = status
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.stall_at is not None:
            self.wfile.write(body[: self.fault.stall_at])
            self.wfile.flush()
            self.hub.closing.wait(60)
        self.wfile.write(body)


def _slice(content: Content, begin: int, end: int) -> bytes:
    if isinstance(content, bytes):
        return content[begin:end]
    with content.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _entries(files: Mapping[str, Content]) -> list[dict[str, object]]:
    folders = {parent for path in files for parent in _parents(path)}
    entries: list[dict[str, object]] = [
        {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders
    ]
    for path, content in files.items():
        entry: dict[str, object] = {"type": "file", "path": path, "size": size_of(content)}
        if in_lfs(path):
            digest, size = sha256_of(content), size_of(content)
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\n"
            pointer += f"size {size}\n"
            entry["oid"] = blob_of(pointer.encode())
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": len(pointer)}
        else:
            entry["oid"] = blob_of(content)
        entries.append(entry)
    return sorted(entries, key=lambda entry: str(entry["path"]))


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def folder_files(root: Path) -> dict[str, Content]:
    """Return the files below a folder by path, to be served from there."""
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description="serve a folder as the repository test/repo")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes-per-second", type=float, help="ceiling of each connection")
    arguments = parser.parse_args()
    repo = Repo("test/repo", folder_files(arguments.folder))
    server = HubServer(repo, bytes_per_second=arguments.bytes_per_second)
    for content in repo.commits[repo.head].values():
        sha256_of(content)
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
