"""Where a server's interfaces are and what a run does, from the environment, because Locust imports the files itself."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import msgspec


class Addresses(msgspec.Struct, frozen=True):
    """Of one server. A master tells its workers."""

    front: str = "http://127.0.0.1:8000"
    triton_grpc: str = "127.0.0.1:8001"
    torchserve_grpc: str = "127.0.0.1:7070"
    mindie: str = "http://127.0.0.1:1025"
    djl: str = "http://127.0.0.1:8085"

    @classmethod
    def of_host(cls, front: str) -> Addresses:
        """The planes of the server with this front plane: at its host and their default ports, unless variables name them."""
        parts = urlsplit(front)
        scheme, host = parts.scheme or "http", parts.hostname or "127.0.0.1"
        given = {
            name: os.environ.get(f"LOAD_{name.upper()}") for name in ("triton_grpc", "torchserve_grpc", "mindie", "djl")
        }
        defaults = {
            "triton_grpc": f"{host}:8001",
            "torchserve_grpc": f"{host}:7070",
            "mindie": f"{scheme}://{host}:1025",
            "djl": f"{scheme}://{host}:8085",
        }
        return cls(front=front.rstrip("/"), **{name: value or defaults[name] for name, value in given.items()})


class LocalServer(msgspec.Struct, frozen=True):
    """A server of this machine that may be watched, put to sleep and robbed of its workers."""

    pid: int
    data_dir: str = ""
    start_s: float = 0.0
    """What it took to become ready."""


class RunSettings(msgspec.Struct, frozen=True):
    """A run, as `python -m loadtests` describes it to Locust in LOAD_RUN."""

    shape: str
    profile: str
    targets: str
    out: str = ""
    """The file that the run is written to; "" for none."""
    seconds: float = 0.0
    """Instead of the profile's time of a stage."""
    users: int = 0
    """Instead of the profile's most users."""
    local: LocalServer | None = None


def run_settings() -> RunSettings | None:
    """The run, or None where Locust was started without one."""
    text = os.environ.get("LOAD_RUN")
    return msgspec.json.decode(text, type=RunSettings) if text else None


MODEL: str = os.environ.get("LOAD_MODEL", "demo")
"""The name by which every dialect finds the model."""
ADAPTERS: tuple[str, ...] = tuple(os.environ.get("LOAD_ADAPTERS", "json,pirate").split(","))
"""Two or more of its adapters, for the shapes with adapters."""
API_KEY: str = os.environ.get("LOAD_API_KEY", "")
REQUEST_TIMEOUT_S = 120.0
