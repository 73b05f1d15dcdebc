"""The declaration of TorchServe's dialect: two gRPC services, and three REST planes that are off unless they have ports."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import structlog

from inference.dialects.torchserve import grpc_inference, grpc_management, grpc_open_inference
from inference.dialects.torchserve.grpc_inference import InferenceService
from inference.dialects.torchserve.grpc_management import ManagementService
from inference.dialects.torchserve.grpc_open_inference import OpenInferenceService
from inference.dialects.torchserve.key_file import KeyFile
from inference.dialects.torchserve.routes import answer_headers, route_sets
from inference.dialects.torchserve.settings import TorchServeSettings
from inference.dialects.torchserve.state import State
from inference.dialects.torchserve.tokens import TokenAuthenticator
from inference.planes.declaration import Dialect, GrpcListener, Parts, PlaneListener, Setup, SetupError
from inference.server.grpc_calls import Timeouts
from inference.server.grpc_standard import standard_services

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services

MAX_CONNECTIONS = 256
logger = structlog.get_logger(__name__)


def configure(settings: TorchServeSettings, server: ServerOptions) -> Setup:
    """Configure the services and planes, which listen on the server's address."""
    folder = settings.torchserve_key_folder or server.data_dir
    ports = _ports_with_keys(settings)
    with_keys = _asks_for_keys(settings, server.host) and any(ports.values())
    if with_keys and settings.torchserve_key_folder is not None and not folder.is_dir():
        raise SetupError("TORCHSERVE_KEY_FOLDER is no folder")

    def start(services: Services, terminate: Terminate) -> Parts:
        keys = _key_file(settings, folder) if with_keys else None
        authenticator = services.authenticator if keys is None else TokenAuthenticator(keys, services.authenticator)
        state = State(settings, services, authenticator, keys)
        timeouts = Timeouts(server.body_timeout_s, server.slow_client_timeout_s)
        return Parts(
            _planes(state, server.host),
            _grpc_listeners(state, server.host, timeouts),
            [state.metrics],
        )

    ports["DRAGOMAN_TORCHSERVE_METRICS_PORT"] = settings.torchserve_metrics_port
    return Setup(start=start, addresses={name: (server.host, port) for name, port in ports.items()})


def _ports_with_keys(settings: TorchServeSettings) -> dict[str, int]:
    """The ports of the services and planes that ask for TorchServe's keys, by their settings."""
    return {
        "DRAGOMAN_TORCHSERVE_GRPC_INFERENCE_PORT": settings.torchserve_grpc_inference_port,
        "DRAGOMAN_TORCHSERVE_GRPC_MANAGEMENT_PORT": settings.torchserve_grpc_management_port,
        "DRAGOMAN_TORCHSERVE_INFERENCE_PORT": settings.torchserve_inference_port,
        "DRAGOMAN_TORCHSERVE_MANAGEMENT_PORT": settings.torchserve_management_port,
    }


def _asks_for_keys(settings: TorchServeSettings, host: str) -> bool:
    if settings.torchserve_token_authorization != "auto":
        return settings.torchserve_token_authorization == "on"
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host != "localhost"


def _key_file(settings: TorchServeSettings, folder: Path) -> KeyFile:
    """The keys in their file. Where nobody has asked for them and they cannot be written, only API keys open the services."""
    keys = KeyFile(folder, settings.torchserve_token_expiration_min * 60)
    try:
        keys.create()
    except OSError as error:
        if settings.torchserve_token_authorization == "on":
            raise SetupError(f"TORCHSERVE_KEY_FOLDER: {error.strerror}") from error
        logger.warning("TorchServe's keys cannot be written; only API keys open its services", reason=error.strerror)
    return keys


def _planes(state: State, host: str) -> list[PlaneListener]:
    settings = state.settings
    ports = {
        "inference": settings.torchserve_inference_port,
        "management": settings.torchserve_management_port,
        "metrics": settings.torchserve_metrics_port,
    }
    return [
        PlaneListener(
            f"torchserve-{name}",
            host,
            ports[name],
            routes,
            settings.torchserve_max_message_bytes,
            answer_headers,
            # TorchServe's metrics need no key of its own; this server's need one where any plane does.
            authenticator=None if state.keys is None or name == "metrics" else state.authenticator,
        )
        for name, routes in route_sets(state).items()
    ]


def _grpc_listeners(state: State, host: str, timeouts: Timeouts) -> list[GrpcListener]:
    settings, services = state.settings, state.services
    inference = InferenceService(state, timeouts).handler()
    management = ManagementService(state, timeouts).handler()
    ports: dict[int, list[tuple[str, grpc.GenericRpcHandler]]] = {}
    ports.setdefault(settings.torchserve_grpc_inference_port, []).append((grpc_inference.SERVICE, inference))
    if settings.torchserve_open_inference_protocol:
        handler = OpenInferenceService(state, timeouts).handler()
        ports[settings.torchserve_grpc_inference_port].append((grpc_open_inference.SERVICE, handler))
    ports.setdefault(settings.torchserve_grpc_management_port, []).append((grpc_management.SERVICE, management))

    def healthy() -> bool:
        return state.healthy

    handlers = [
        (port, handler)
        for port, found in ports.items()
        for handler in (
            *(handler for _, handler in found),
            *standard_services([name for name, _ in found], healthy, services, timeouts),
        )
    ]
    return [
        GrpcListener(host, port, handler, settings.torchserve_max_message_bytes, MAX_CONNECTIONS)
        for port, handler in handlers
    ]


DIALECT = Dialect("torchserve", "TorchServe", settings=TorchServeSettings, configure=configure)
