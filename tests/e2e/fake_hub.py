"""A server that plays the Hugging Face hub, on the loopback address, with repositories in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class FakeHub(ThreadingHTTPServer):
    """Repositories by name, each with its files. As a context manager it serves.

    `sent` counts the requests for the content of each file, with the first byte that each asked for. A file in `stops`
    is sent up to that byte: its connection then breaks, once, or, with `hangs`, stays open without more bytes until the
    server closes.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], *, gated: tuple[str, ...] = ()) -> None:
        self.repositories = repositories
        self.gated = gated
        self.sent: list[tuple[str, int]] = []
        self.stops: dict[str, int] = {}
        self.hangs = False
        self.is_hanging = threading.Event()
        self.is_closed = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_closed.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+).*)?", path):
            self._describe(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(found[1], found[2])
        else:
            self._fail(404, "EntryNotFound")

    def _describe(self, name: str, what: str | None, revision: str) -> None:
        files = self.server.repositories.get(name)
        if name in self.server.gated:
            return self._fail(403, "GatedRepo")
        if files is None:
            return self._fail(401, "RepoNotFound")
        if revision not in {"main", COMMIT}:
            return self._fail(404, "RevisionNotFound")
        if what == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                for path, content in files.items()
            ]
            return self._send_json(entries)
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": _digest(content)} for path, content in files.items()
        ]
        return self._send_json({"id": name, "sha": COMMIT, "siblings": siblings})

    def _send_file(self, name: str, path: str) -> None:
        content = self.server.repositories[name].get(path)
        if content is None:
            return self._fail(404, "EntryNotFound")
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.server.sent.append((path, begin))
        stop = self.server.stops.pop(path, None)
        self.wfile.write(content[begin:stop])
        if stop is not None:
            self.wfile.flush()
            if self.server.hangs:
                self.server.is_hanging.set()
                self.server.is_closed.wait()
            self.close_connection = True
        return None

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
