"""A process that answers /health and streams /v1/completions as the arguments say. It computes nothing.

    python fake_server.py PORT [--refuse N] [--short] [--spin]

`--refuse N` answers 503 to the first N requests. `--short` sends a token less than asked for. `--spin` keeps a thread busy.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    refused = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if Handler.refused < self.options.refuse:
            Handler.refused += 1
            self.send_response(503)
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"busy")
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        tokens = body["max_tokens"] - self.options.short
        for number in range(tokens):
            last = number + 1 == tokens
            self._event({"choices": [{"text": " word", "finish_reason": "length" if last else None}]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        self.close_connection = True

    def _event(self, event: dict) -> None:
        content = b"data: " + json.dumps(event).encode() + b"\n\n"
        half = len(content) // 2  # as events come that do not fit into a packet
        self._chunk(content[:half])
        self._chunk(content[half:])

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--spin", action="store_true")
    Handler.options = parser.parse_args()
    if Handler.options.spin:
        threading.Thread(target=spin, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()
