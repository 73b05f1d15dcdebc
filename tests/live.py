"""A real server process on loopback, as `make serve` starts it, and raw HTTP to talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import httpx
import psutil

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.waiting import wait_until

START_TIMEOUT_S = 360


OWN_PORTS = range(12_000, 32_000)
"""Below the range from which a system takes the ports of connections, so that none of these takes one before its server starts."""
_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens, which neither this process nor one that runs tests beside it was given before."""
    choose = random.SystemRandom()  # whatever a test has seeded
    beside = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = OWN_PORTS[beside :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    if len(_given) > len(own) // 2:
        _given.clear()  # those of servers that ended long ago
    while True:
        port = choose.choice(own)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so does all that comes from it; servers here do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class LiveServer:
    data_dir: Path
    model: str = str(DEMO)
    environment: dict[str, str] = field(default_factory=dict)
    front_port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    mindie_port: int = field(default_factory=free_port)
    management_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    djl_port: int = field(default_factory=free_port)
    torchserve_inference_port: int = field(default_factory=free_port)
    torchserve_management_port: int = field(default_factory=free_port)
    rest_ports: dict[str, int] = field(default_factory=dict)
    """Planes that are switched off by default, by name: their settings are DRAGOMAN_<NAME>_PORT."""
    program: list[str] = field(default_factory=lambda: [sys.executable, "-W", "ignore", "manage.py"])
    folder: Path = ROOT
    verify: ssl.SSLContext | bool = True
    """How a server with TLS is called."""
    process: subprocess.Popen | None = None

    @cached_property
    def client(self) -> httpx.Client:
        """Calls with the certificates that this server asks for."""
        if self.verify is True:
            return calls.client
        return httpx.Client(verify=self.verify, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def scheme(self) -> str:
        return "https" if "DRAGOMAN_TLS_CERTIFICATE" in self.environment else "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.front_port}"

    @property
    def admin_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.control_port}"

    @property
    def mindie_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.mindie_port}"

    @property
    def management_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.management_port}"

    @property
    def metrics_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.metrics_port}"

    @property
    def djl_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.djl_port}"

    @property
    def plane_urls(self) -> dict[str, str]:
        """By a plane's name; those of `rest_ports` only where they are given."""
        ports = {"front": self.front_port, "control": self.control_port, "djl": self.djl_port,
                 "mindie-service": self.mindie_port, "mindie-management": self.management_port,
                 "mindie-metrics": self.metrics_port, **self.rest_ports}  # fmt: skip
        return {plane: f"{self.scheme}://127.0.0.1:{port}" for plane, port in ports.items()}

    def grpc_address(self, method: str) -> str:
        """Where a gRPC method is served."""
        if "ManagementAPIsService" in method:
            return f"127.0.0.1:{self.torchserve_management_port}"
        port = self.grpc_port if method.startswith("/inference.") else self.torchserve_inference_port
        return f"127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return (self.data_dir / "test.log").read_text()

    def settings(self) -> dict[str, str]:
        """The environment of the server's process."""
        return {
            **os.environ,
            "DRAGOMAN_DATA_DIR": str(self.data_dir),
            "DRAGOMAN_FRONT_PORT": str(self.front_port),
            "DRAGOMAN_CONTROL_PORT": str(self.control_port),
            "DRAGOMAN_MINDIE_PORT": str(self.mindie_port),
            "DRAGOMAN_MINDIE_MANAGEMENT_PORT": str(self.management_port),
            "DRAGOMAN_MINDIE_METRICS_PORT": str(self.metrics_port),
            "DRAGOMAN_GRPC_PORT": str(self.grpc_port),
            "DRAGOMAN_DJL_PORT": str(self.djl_port),
            "DRAGOMAN_TORCHSERVE_GRPC_INFERENCE_PORT": str(self.torchserve_inference_port),
            "DRAGOMAN_TORCHSERVE_GRPC_MANAGEMENT_PORT": str(self.torchserve_management_port),
            "DRAGOMAN_THREADS": "1",
            # Beside other test processes a queue may well take longer than is usual.
            "DRAGOMAN_TARGET_TTFT_MS": "0",
            "DRAGOMAN_MODEL": self.model,
            **{
                f"DRAGOMAN_{plane.upper().replace('-', '_')}_PORT": str(port) for plane, port in self.rest_ports.items()
            },
            **self.environment,
        }

    def start(self, wait: bool = True) -> LiveServer:
        self.data_dir.mkdir(exist_ok=True, parents=True)
        environment = self.settings()
        with (self.data_dir / "test.log").open("a") as log:
            self.process = subprocess.Popen(
                [*self.program, "serve"],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=heed_interrupts,
            )
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop(signal.SIGKILL)
                raise
        return self

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        wait_until(lambda: self.healthy(), timeout_s, lambda: self.log)

    def healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/health").status_code == 200
        return False

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 120) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout_s)

    def workers(self) -> list[psutil.Process]:
        assert self.process is not None
        return [p for p in psutil.Process(self.process.pid).children() if "engine" in p.cmdline()]

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.client.post(f"{self.url}{path}", content=content, **options)

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.client.get(f"{self.url}{path}", **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that carry these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                total += float(match[2])
        return total

    def wait_idle(self) -> None:
        """Every engine gauge is back at zero."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        wait_until(lambda: all(self.metric(name) == 0 for name in names), 60, lambda: self.get("/metrics").text)

    @contextlib.contextmanager
    def raw(self, path: str, body: object) -> Iterator[socket.socket]:
        """A socket that has sent a POST and read nothing."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        with self.connection() as connection:
            connection.sendall(head + content)
            yield connection

    def connection(self) -> socket.socket:
        """A new connection to the front plane."""
        plain = socket.create_connection(("127.0.0.1", self.front_port), timeout=30)
        if not isinstance(self.verify, ssl.SSLContext):
            return plain
        return self.verify.wrap_socket(plain, server_hostname="localhost")


def events(response: httpx.Response) -> list[object]:
    """The JSON of every `data:` frame; [DONE] stays text."""
    frames = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [f if f == "[DONE]" else json.loads(f) for f in frames]
