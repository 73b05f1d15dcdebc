"""Runs a serving process, of `serve` or `web`: startup, main loop, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inference.server.plane_server import FINAL_EVENT_S, PlaneServer  # first: installs the asyncio reactor

# isort: split
import structlog
from django.conf import settings

from config import logs
from config.asgi import PlaneRouter
from config.installation import version
from config.listeners import build_listeners
from config.open_files import allow_open_files
from config.registry import DjangoRegistry
from config.shared_rates import shared_rates_of
from config.telemetry import telemetry_of
from engine import faults
from engine.process.precautions import write_no_core
from inference import errors
from inference.admission.charges import Charges
from inference.admission.idempotency import IdempotencyStore
from inference.admission.permits import Admission
from inference.admission.rates import RateMeter
from inference.admission.standing import Standings
from inference.generation.embeddings import Embedder
from inference.generation.prepare import Generator
from inference.http.auth import Authenticator, Credentials
from inference.http.offload import prepare_process
from inference.http.sites import Sites
from inference.metrics.load import LoadRecorder
from inference.metrics.requests import Metrics
from inference.metrics.usage import UsageRecorder
from inference.planes.plane import Plane
from inference.server.accepting import warn_of_descriptors
from inference.server.listener import CannotBind
from inference.server.listening import SharedSockets
from inference.server.rotation import keep_fresh
from inference.services import Limits, Services, Shown
from inference.telemetry.base import Telemetry
from inference.workers.adapters import AdapterControl
from inference.workers.holding import HoldQueue
from inference.workers.router import EngineRouter
from management import live, publishing
from management.api import authorization
from management.api.scalegenai.errors import ApiError
from management.usage_writer import UsageWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from config.control import Control
    from config.options import Options
    from engine.messages import Stats
    from inference.generation.generation import Observer
    from inference.http.exchange import Response
    from inference.planes.declaration import Dialect, Setup
    from inference.server.listener import Listener

logger = structlog.get_logger(__name__)

REPORT_EVERY_S = 1.0
KEYED_PATHS, PUBLIC_DOCUMENT = ("/sg_inf", "/secret", "/user/verify"), "/sg_inf/openapi.json"
"""Of the control plane's API."""
ONE_HOST = "A request must have exactly one Host header."


class Server:
    """The planes, the control plane's part in this process, and the connections to the workers."""

    def __init__(
        self, options: Options, dialects: Sequence[Dialect], setups: Sequence[Setup], control: Control
    ) -> None:
        """`setups` are the configured dialects. Raises SetupError, TlsError, TelemetryError or another ValueError, and binds nothing."""
        self.options, self.dialects, self.control = options, dialects, control
        self.holder = control.holder
        self.holding = HoldQueue(
            max_per_deployment=options.max_held_requests_per_deployment, max_total=options.max_held_requests
        )
        self.router = EngineRouter(
            self.holder,
            self.holding,
            options.parse_special_tokens,
            hold_s=options.hold_s,
            credentials=options.network.credentials,
        )
        self.load = LoadRecorder(control.process, self.router, self.holding)
        self.holding.on_refused = self.load.rejected
        self.holding.on_first = self._report_now
        rates = RateMeter()
        self.shared_rates = shared = shared_rates_of(options, rates, control.process)
        # Where processes share a ledger, it knows what keys spent.
        recorded = {} if shared is not None else {"recorded": rates.recorded}
        self.usage = UsageRecorder(options.usage_end_users, settings.SECRET_KEY, **recorded)
        metrics = Metrics(
            self.router,
            logs.dropped_lines,
            control.registry_reachable,
            None if shared is None else lambda: shared.reachable,
        )
        hosts = [options.host, *(host for setup in setups for host in setup.hosts)]
        options.check_faults(hosts)
        registry = DjangoRegistry(control, options.allowed_adapter_roots(hosts))
        self.telemetry = telemetry_of(options.otlp_traces_endpoint)
        observers: list[Observer] = [
            metrics,
            self.load,
            self.usage,
            Charges(rates),
            *([] if self.telemetry is None else [self.telemetry]),
        ]
        limit = max([options.max_concurrent_requests, *(setup.max_concurrent_requests for setup in setups)])
        self.services = Services(
            holder=self.holder,
            router=self.router,
            generator=Generator(
                self.router,
                observers,
                request_timeout_s=options.request_timeout_s,
                replay_wait_s=options.replay_wait_s,
                token_timeout_s=options.token_timeout_s,
            ),
            embedder=Embedder(
                self.router,
                options.request_timeout_s,
                options.replay_wait_s,
                self.load.tracked,
                metrics.rejected,
                observers,
                rates.charge,
            ),
            adapters=AdapterControl(registry, self.router, self.holder),
            registry=registry,
            admission=Admission(limit, options.max_requests_per_tenant),
            authenticator=Authenticator(options.api_key_required, options.own_keys),
            metrics=metrics,
            limits=Limits(max_body_bytes=options.max_body_bytes),
            sites=Sites(
                options.own_hosts,
                frozenset(options.allowed_origins),
                frozenset(options.allowed_methods),
                frozenset(options.allowed_headers),
                options.allow_credentials,
            ),
            version=version(),
            shown=Shown(options.show_cached_tokens, options.show_adapter_paths),
            telemetry=self.telemetry or Telemetry(),
            rates=rates,
            standings=Standings(options.inference_objectives),
            idempotency=IdempotencyStore(options.max_idempotency_bytes),
        )
        self.services.admission.on_refused = metrics.rejected
        self.services.idempotency.replayed = metrics.replayed
        self.listeners = build_listeners(options, dialects, setups, self.services, self._terminate)
        self.planes = PlaneRouter(self.listeners.shared)
        self.grpc = self.listeners.grpc_servers(options.headers_timeout_s, control.shares_ports)
        self.sockets = SharedSockets(options.shared_dir()) if control.shares_ports else None
        self.failed: str | None = None
        """Why startup failed."""
        self._announcing: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Startup → main loop → shutdown; returns the exit status."""
        options = self.options
        allow_open_files()
        warn_of_descriptors()
        write_no_core()
        live.set_source(self._stats)
        publishing.set_refresh(self.control.refresh)
        server = PlaneServer(
            self.planes,
            self._listeners(),
            refuse=self._refuse,
            preview=self._preview,
            overloaded=self._overloaded,
            max_body_bytes=self._max_body_bytes,
            drain_s=options.drain_s,
            linger_s=options.linger_s if self.sockets is not None else 0.0,
            slow_client_timeout_s=options.slow_client_timeout_s,
            headers_timeout_s=options.headers_timeout_s,
            body_timeout_s=options.body_timeout_s,
            max_connections=options.max_connections,
            on_ready=self._ready,
            on_leave=self._leave,
            on_drain=self._drain,
            on_deadline=self.router.stop,
        )
        try:
            writer = UsageWriter(self.control.process, self.usage, options.usage_keep_days)
            self.control.start(self.load, writer.run)
            server.run()
        finally:
            if self.sockets is not None:
                self.sockets.close()
            self.control.stop()
            if self.telemetry is not None:
                self.telemetry.close()
        failed = server.failed or self.failed
        if failed:
            print(f"error: {failed}", file=sys.stderr)
            return 1
        return 0

    def _listeners(self) -> list[Listener]:
        """What to listen on; sockets that other processes share are opened here. Raises OSError."""
        endpoints = self.listeners.endpoints
        if self.sockets is None:
            return endpoints
        opened = self.sockets.open({(each.host, each.port): each.setting for each in endpoints})
        return [replace(each, socket=opened[each.host, each.port]) for each in endpoints]

    def _ready(self) -> None:
        loop = asyncio.get_event_loop()
        self._announcing = loop.create_task(self._start())

    async def _start(self) -> None:
        try:
            for server in self.grpc:
                await server.start()
        except CannotBind as error:
            self.failed = str(error)
            self._terminate(None)
            return
        prepare_process()
        self.router.start()
        loop = asyncio.get_running_loop()
        lasting = [loop.create_task(self._report_load()), loop.create_task(keep_fresh(self.listeners.opened.values()))]
        if self.shared_rates is not None:
            lasting.append(loop.create_task(self.shared_rates.run()))
        try:
            await self._announce()
            await asyncio.gather(*lasting)
        finally:
            for task in lasting:
                task.cancel()

    def _report_now(self) -> None:
        """A request waits for a deployment: whoever wakes it need not wait for the next report."""
        self.load.refresh()
        self.control.hurry()

    async def _report_load(self) -> None:
        """Make the reports from which deployments are scaled."""
        while True:
            self.load.refresh()
            self.usage.refresh()
            if faults.armed:
                faults.hit("loop")
            await asyncio.sleep(REPORT_EVERY_S)

    def _leave(self) -> list[asyncio.Task[None]]:
        """End gRPC's connections to this process before it refuses anything: their clients connect to another one."""
        loop, linger_s = asyncio.get_event_loop(), 0.0 if self.sockets is None else self.options.linger_s
        grace_s = linger_s + self.options.drain_s + FINAL_EVENT_S
        return [loop.create_task(server.stop(grace_s)) for server in self.grpc]

    def _drain(self) -> None:
        self.services.admission.draining = True
        self.services.lasting.end()
        logger.info("draining", running=self.services.admission.in_flight)

    def _terminate(self, force_after_s: float | None) -> None:
        """Stop this process as on SIGTERM; after that many seconds kill it."""
        if force_after_s is not None:
            timer = threading.Timer(force_after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        os.kill(os.getpid(), signal.SIGTERM)

    def _max_body_bytes(self, host: str, port: int) -> int:
        return max(self.listeners.limits[address] for address in self.listeners.limits if address[1] == port)

    def _refuse(
        self, host: str, port: int, method: str, path: str, headers: dict[bytes, bytes], status: int
    ) -> tuple[list[tuple[bytes, bytes]], bytes, bytes]:
        """The response to a request that the server refuses itself."""
        plane = self.planes.planes_of(host, port).plane_of(method, path)
        limit = self._max_body_bytes(host, port)
        error = errors.BodyTooLarge(limit) if status == 413 else errors.MalformedBody(ONE_HOST)
        if not isinstance(plane, Plane) and path.startswith("/sg_inf/"):
            return (
                [(b"content-type", b"application/json")],
                json.dumps(ApiError(status, error.message).body).encode(),
                b"",
            )
        if not isinstance(plane, Plane):
            return [(b"content-type", b"text/plain; charset=utf-8")], error.message.encode(), b""
        response = plane.refuse(method, path, error, headers)
        return [(b"content-type", response.content_type), *response.headers], response.body, response.reason

    def _preview(
        self, host: str, port: int, method: str, path: str, headers: dict[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes, bytes] | None:
        """The early response that the headers decide; None if the body is needed."""
        plane = self.planes.planes_of(host, port).plane_of(method, path)
        if isinstance(plane, Plane):
            return _parts(plane.preview(method, path, headers))
        return self._refused_control(path, headers)

    def _refused_control(
        self, path: str, headers: dict[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes, bytes] | None:
        """The refusal of a call of the control plane's API without a valid key, before its body is read or the database asked."""
        if not path.startswith(KEYED_PATHS) or path == PUBLIC_DOCUMENT:
            return None
        try:
            self.services.authenticator.check(Credentials.in_headers(headers), authorization.SCOPE, self.holder.current)
        except errors.Unauthorized:
            body = json.dumps(ApiError(401, authorization.KEY_REQUIRED).body).encode()
            return 401, [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")], body, b""
        except errors.Forbidden:
            pass  # the view says what is missing
        return None

    def _overloaded(
        self, host: str, port: int, method: str, path: str, headers: dict[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes, bytes] | None:
        """The early response when no permit is free."""
        if not self.services.admission.crowded:
            return None
        plane = self.planes.planes_of(host, port).plane_of(method, path)
        return _parts(plane.overloaded(method, path, headers) if isinstance(plane, Plane) else None)

    def _stats(self) -> dict[str, Stats]:
        return {
            worker.worker_id: client.stats
            for target in self.router.targets
            for worker, client in list(target.clients.items())
        }

    async def _announce(self) -> None:
        """Print to the terminal when the model is ready, or why it is not."""
        options = self.options
        while not self.router.ready:
            failure = await asyncio.to_thread(self.control.failure)
            if failure:
                print(f"\nThe deployment {failure[0]} failed: {failure[1]}", flush=True)
                print(f"The server stays up; the admin is at {_url(options, options.control_port)}/admin/", flush=True)
                return
            await asyncio.sleep(0.1)
        print(_welcome(options, self.dialects, self.router.targets[0].entry.name), flush=True)


def _parts(response: Response | None) -> tuple[int, list[tuple[bytes, bytes]], bytes, bytes] | None:
    if response is None:
        return None
    return (
        response.status,
        [(b"content-type", response.content_type), *response.headers],
        response.body,
        response.reason,
    )


def _welcome(options: Options, dialects: Sequence[Dialect], model: str) -> str:
    titles = ", ".join(dialect.title for dialect in dialects if dialect.front is not None)
    front, control = _url(options, options.front_port), _url(options, options.control_port)
    key = ' -H "authorization: Bearer $KEY"' if options.api_key_required else ""
    lines = [
        "",
        f"{model} is ready.",
        "",
        f"  {titles}   {front}   (documentation: {front}/docs, metrics: {front}/metrics)",
        f"  {'Admin'.ljust(len(titles))}   {control}/admin/   (user admin, password in {_shown(options.data_dir / 'admin-password')})",
        "",
        f"  curl {front}/v1/chat/completions -H 'content-type: application/json'{key} \\",
        '    -d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
        "",
    ]
    if options.api_key_required:
        lines.append(f"  API keys are required: make one with `{Path(sys.argv[0]).name} createkey NAME`.\n")
    return "\n".join(lines)


def _url(options: Options, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{options.scheme}://{host}:{port}"


def _shown(path: os.PathLike[str]) -> str:
    """The path relative to the current folder if that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)
