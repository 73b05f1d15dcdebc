"""A Redis of a test's own, which can be stopped, emptied and paused. Skips where none is installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from dataclasses import dataclass, field

import redis

from tests.live import free_port
from tests.requirements import need
from tests.waiting import wait_until

PASSWORD = "a-password-of-the-ledger"


@dataclass
class OwnRedis:
    """One server process on a port of its own, which keeps nothing on disk."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        need("Redis")
        self.program = shutil.which("redis-server")
        self.start()

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Start it empty."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
        self.process = subprocess.Popen([self.program, *options], stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def stop(self) -> None:
        self.resume()
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Connections stay, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
