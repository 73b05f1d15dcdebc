"""Everything that `manage.py serve` runs in its process: startup, the main loop, shutdown."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from importlib import metadata
from typing import TYPE_CHECKING

from inference.server.plane_server import PlaneServer  # first: installs the asyncio reactor

# isort: split
import structlog

from config.asgi import PlaneRouter, SharedPort, application
from inference import errors
from inference.admission import Admission
from inference.auth import Authenticator
from inference.embeddings import Embedder
from inference.front import front_plane
from inference.generate import Generator
from inference.metrics import Metrics
from inference.router import EngineRouter
from inference.services import Limits, Services
from management import live
from management.launchers.local import LocalLauncher
from management.reconcile import Reconciler
from management.snapshot import SnapshotHolder

if TYPE_CHECKING:
    from config.options import Options
    from engine.messages import Stats

logger = structlog.get_logger(__name__)


class Server:
    """The planes, the reconciler and the connections to the workers."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.holder = SnapshotHolder()
        self.launcher = LocalLauncher()
        self.reconciler = Reconciler(self.launcher, self.holder, str(options.data_dir))
        self.router = EngineRouter(self.holder)
        metrics = Metrics(self.router)
        self.services = Services(
            holder=self.holder,
            router=self.router,
            generator=Generator(self.router, metrics, options.request_timeout_s),
            embedder=Embedder(self.router, options.request_timeout_s),
            admission=Admission(options.max_concurrent_requests),
            authenticator=Authenticator(options.api_key_required),
            metrics=metrics,
            limits=Limits(),
            version=_version(),
        )
        self.front = front_plane(self.services)
        self.stopping = threading.Event()
        self._announcing: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Startup → main loop → shutdown; returns the exit status."""
        options = self.options
        live.set_source(self._stats)
        self.reconciler.forget_earlier_workers()
        self.reconciler.reconcile_once()  # the worker loads its model while the rest of this starts
        loop_of_reconciler = threading.Thread(target=self.reconciler.run, args=(self.stopping,), name="reconciler")
        planes = {options.front_port: self.front, options.control_port: application}
        if len(planes) == 1:
            planes = {options.front_port: SharedPort(self.front, application)}
        server = PlaneServer(
            PlaneRouter(planes),
            [f"tcp:{port}:interface={options.host.replace(':', chr(92) + ':')}" for port in planes],
            refuse=self._refuse,
            max_body_bytes=options.max_body_bytes,
            drain_s=options.drain_s,
            slow_client_timeout_s=options.slow_client_timeout_s,
            headers_timeout_s=options.headers_timeout_s,
            body_timeout_s=options.body_timeout_s,
            on_ready=self._ready,
            on_drain=self._drain,
            on_deadline=self.router.stop,
        )
        loop_of_reconciler.start()
        try:
            server.run()
        finally:
            self.stopping.set()
            loop_of_reconciler.join()
            self.launcher.close()
            self.reconciler.forget_earlier_workers()
        if server.failed:
            print(f"error: {server.failed}", file=sys.stderr)
            return 1
        return 0

    def _ready(self) -> None:
        loop = asyncio.get_event_loop()
        self._announcing = loop.create_task(self._start())

    async def _start(self) -> None:
        self.router.start()
        await self._announce()

    def _drain(self) -> None:
        self.services.admission.draining = True
        logger.info("draining", running=self.services.admission.inside)

    def _refuse(self, port: int, path: str, status: int) -> tuple[bytes, bytes]:
        """The answer to a request that the server itself turned down."""
        limit = self.options.max_body_bytes
        error = (
            errors.BodyTooLarge(f"The request body is larger than {limit} bytes.")
            if status == 413
            else errors.MalformedBody("A request must have exactly one Host header.")
        )
        response = self.front.refuse(path, error)
        return response.content_type, response.body

    def _stats(self) -> dict[str, Stats]:
        return {
            worker.worker_id: client.stats
            for target in self.router.targets
            for worker, client in list(target.clients.items())
        }

    async def _announce(self) -> None:
        """Tell the person at the terminal when the model answers, or why it does not."""
        from management.models import Deployment

        options = self.options
        while not self.router.ready:
            failed = [row async for row in Deployment.objects.filter(state=Deployment.State.FAILED, replicas__gt=0)]
            if failed:
                print(f"\nThe deployment {failed[0].name} failed: {failed[0].reason}", flush=True)
                print(f"The server stays up; the admin is at {_url(options, options.control_port)}/admin/", flush=True)
                return
            await asyncio.sleep(0.1)
        print(_welcome(options, self.router.targets[0].entry.name), flush=True)


def _welcome(options: Options, model: str) -> str:
    front, control = _url(options, options.front_port), _url(options, options.control_port)
    key = ' -H "authorization: Bearer $KEY"' if options.api_key_required else ""
    lines = [
        "",
        f"{model} is ready.",
        "",
        f"  OpenAI and TGI   {front}   (documentation: {front}/docs, metrics: {front}/metrics)",
        f"  Admin            {control}/admin/   (user admin, password in {_shown(options.data_dir / 'admin-password')})",
        "",
        f"  curl {front}/v1/chat/completions{key} \\",
        '    -d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
        "",
    ]
    if options.api_key_required:
        lines.append("  API keys are required: make one with `manage.py createkey NAME`.\n")
    return "\n".join(lines)


def _url(options: Options, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{port}"


def _shown(path: os.PathLike[str]) -> str:
    """Relative where that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)


def _version() -> str:
    try:
        return metadata.version("dragoman")
    except metadata.PackageNotFoundError:
        return "0.1.0"
