"""The actor beside a worker, on the machine that Ray has chosen. It starts the worker as its child and ends with it.

It reads no settings and no registry, and passes on no requests. Its machine needs the same installation as the reconciler's, and the
cluster's files at the same paths.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import ray

from engine.config import EngineConfig
from engine.network.credentials import CredentialsError
from management.launchers.environment import worker_environment
from management.launchers.local import ROOT
from management.launchers.network import Network
from management.launchers.place import HOST
from management.launchers.ray import child

if TYPE_CHECKING:
    from collections.abc import Mapping

START_WITHIN_S = 60.0
"""A supervisor that nobody has told anything by then ends: whoever asked for it is gone."""
LINGER_S = 5.0
"""How long a supervisor outlives its worker, to say how that ended."""


class Supervisor:
    """One worker's. Its methods run one after the other, in the actor's main thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._give_up, daemon=True).start()

    def start(
        self, config: bytes, ports: tuple[int, int], secrets: Mapping[str, str]
    ) -> tuple[str, str, str, dict[str, str]]:
        """Start the worker on a free port; returns its address, its host, and the id and labels of the machine in Ray.

        `config`: an EngineConfig as JSON, with the cluster's certificates. Secrets come with this call, never with the actor:
        Ray's head stores what actors are made of. Raises OSError with nothing left behind.
        """
        context = ray.get_runtime_context()
        labels: dict[str, str] = context.get_node_labels()
        host = labels.get(HOST) or ray.util.get_node_ip_address()
        options = msgspec.json.decode(config, type=EngineConfig)
        if options.tls is None:
            raise OSError("a worker that Ray places needs the cluster's certificates")
        try:
            options.tls.check()
        except CredentialsError as error:
            raise OSError(f"{host}: {error}") from error
        address = Network(host, range(ports[0], ports[1] + 1), options.tls).address()
        process = subprocess.Popen(
            [sys.executable, str(Path(child.__file__)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env=worker_environment(os.environ) | dict(secrets),
            start_new_session=True,
        )
        if process.stdin is None:
            raise RuntimeError("the worker's pipe was not made")
        with suppress(OSError), process.stdin as stdin:  # if it ended at once, its exit status will say so
            stdin.write(msgspec.json.encode(msgspec.structs.replace(options, address=str(address))) + b"\n")
        self._process = process
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()
        return str(address), host, context.get_node_id(), labels

    def wait(self) -> int:
        """The worker's exit status, when it has ended."""
        if self._process is None:
            raise RuntimeError("no worker was started")
        return self._process.wait()

    def _give_up(self) -> None:
        time.sleep(START_WITHIN_S)
        if self._process is None:
            os._exit(0)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        time.sleep(LINGER_S)
        os._exit(0)
