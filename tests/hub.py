"""A model hub on loopback with the calls that huggingface_hub makes for a snapshot, and a list of who asked for what."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Serves `folders` by repository id; a repository in `tokens` asks for this token."""

    folders: dict[str, Path]
    tokens: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Methods with paths, and Authorization headers."""

    def __post_init__(self) -> None:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, name="hub", daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        authorization = handler.headers.get("Authorization", "")
        self.asked.append((f"{handler.command} {path}", authorization))
        for name, folder in self.folders.items():
            if path.startswith((f"/api/models/{name}/", f"/{name}/resolve/")) or path == f"/api/models/{name}":
                if self.tokens.get(name, "") not in authorization:
                    return self._send(handler, 401, b"{}", {"X-Error-Code": "GatedRepo"})
                return self._repository(handler, path, name, folder)
        return self._send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _repository(self, handler: BaseHTTPRequestHandler, path: str, name: str, folder: Path) -> None:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if path.startswith(f"/api/models/{name}/tree/"):
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            return self._send(handler, 200, json.dumps(tree).encode())
        if path.startswith("/api/"):
            siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in files]
            info = {"id": name, "modelId": name, "sha": REVISION, "siblings": siblings, "private": False, "tags": []}
            return self._send(handler, 200, json.dumps(info).encode())
        file = folder / path.rpartition("/")[2]
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": REVISION}
        return self._send(handler, 200, file.read_bytes(), headers)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
