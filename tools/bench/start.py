"""Measures the time from starting `serve` to the first token, from nothing and with what an earlier start has left.

    python -m tools.bench.start [--model models/demo] [--rounds 3]

From nothing: no database, and no compiled kernels (`XDG_CACHE_HOME` is an empty folder). Then again with both. A client asks for a
stream of one token again and again from the first moment; the table has the seconds until the port accepted it, until the
server was healthy, and until the token came. The installation of the packages is not part of it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from loadtests.server import ROOT, environment, free_port

PATIENCE_S = 600.0
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 1, "stream": True, "temperature": 0}).encode()


def status(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and the body of an answer; 0 if nobody accepts the connection. Raises HTTPError for others than 200 and 503."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return error.code, b""
    except OSError:
        return 0, b""


def start(folder: Path, model: str) -> tuple[float, float, float]:
    """Seconds from the start of the process until it accepts, is healthy, and has sent a token."""
    front = free_port()
    settings = environment(front, free_port(), folder / "data", {"MODEL": model})
    url, times = f"http://127.0.0.1:{front}", []
    begin = time.monotonic()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "manage.py", "serve"],
            cwd=ROOT,
            env={**settings, "XDG_CACHE_HOME": str(folder / "cache")},
            stdout=log,
            stderr=log,
        )
    try:
        for reached in (
            lambda: status(f"{url}/health")[0] > 0,
            lambda: status(f"{url}/health")[0] == 200,
            lambda: b"data: {" in status(f"{url}/v1/completions", BODY)[1],
        ):
            while not reached():
                if process.poll() is not None or time.monotonic() - begin > PATIENCE_S:
                    raise RuntimeError((folder / "log").read_text()[-2000:])
                time.sleep(0.02)
            times.append(time.monotonic() - begin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    accepts, healthy, token = times
    return accepts, healthy, token


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo", help="A directory or a hub id.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print("| round | what is there | accepts, s | healthy, s | first token, s |\n| --- | --- | --- | --- | --- |")
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="dragoman-start-") as name:
            folder = Path(name)
            (folder / "data").mkdir()
            for what in ("nothing", "database and kernels"):
                accepts, healthy, token = start(folder, arguments.model)
                print(f"| {number} | {what} | {accepts:.1f} | {healthy:.1f} | {token:.1f} |", flush=True)


if __name__ == "__main__":
    main()
