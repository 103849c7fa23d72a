"""A hub on loopback, with what a download of the hub's own client asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in folders, ``root/owner/name``.

    Attributes:
        fetched: Files whose contents were asked for, in order.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""

    def _answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._about(self.server.root / parts[2] / parts[3], parts[4:])
        else:
            file = self.server.root.joinpath(*parts[:2], *parts[4:])
            self._file(file, body)

    def _about(self, folder: Path, what: list[str]) -> None:
        if not folder.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        names = [f.relative_to(folder).as_posix() for f in files]
        if what[:1] == ["tree"]:
            found: object = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": _tag(f)}
                for n, f in zip(names, files, strict=True)
            ]
        else:
            found = {
                "id": "/".join(folder.parts[-2:]),
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in names],
            }
        self._send(200, json.dumps(found).encode(), {})

    def _file(self, file: Path, body: bool) -> None:
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_tag(file)}"', "X-Repo-Commit": COMMIT}
        if body:
            self.server.fetched.append(file.name)
        self._send(200, file.read_bytes(), headers, body)

    def _send(
        self, code: int, data: bytes, headers: dict[str, str], body: bool = True
    ) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _tag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """A hub that runs as long as the context."""
    server = Hub(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
