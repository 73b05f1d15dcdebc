"""`python -m loadtests`: run the suite against a running server.

Without --host it starts a server with the demo model on free ports, and stops it afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from loadtests.server import running_server

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run Locust; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", help="A running server, e.g. http://127.0.0.1:8000.")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--targets", default=str(ROOT / "loadtests" / "targets.toml"))
    options = parser.parse_args()
    with _host(options.host) as host:
        command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary",
                   "-H", host, "-u", str(options.users), "-r", str(options.users), "-t", f"{options.seconds}s",
                   "--stop-timeout", "30"]  # fmt: skip
        environment = {**os.environ, "LOAD_TARGETS": options.targets, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


@contextlib.contextmanager
def _host(given: str | None) -> Iterator[str]:
    if given:
        yield given
    else:
        with running_server({}) as url:
            yield url


if __name__ == "__main__":
    sys.exit(main())
