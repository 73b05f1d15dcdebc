"""The declaration of MindIE's dialect. All its routes are on three planes of its own; config.json may configure them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.mindie.config_file import MindieConfigError, read_config, wire_settings
from inference.dialects.mindie.disaggregation.decode import services_of
from inference.dialects.mindie.disaggregation.instance import Instance
from inference.dialects.mindie.disaggregation.peers import Peers
from inference.dialects.mindie.environment import MindieEnvironment
from inference.dialects.mindie.listeners import inter_comm, inter_comm_tls, plane_addresses, port_setting, tls_files
from inference.dialects.mindie.routes import answer_headers, route_sets
from inference.dialects.mindie.state import MindieState
from inference.planes.declaration import Dialect, GrpcListener, Parts, PlaneListener, Setup, WantedDeployment
from inference.server.grpc_calls import Timeouts

if TYPE_CHECKING:
    from inference.dialects.mindie.config_file import MindieConfig
    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services

MAX_INSTANCES = 1024
TOKEN_BYTES = 16 << 20
"""The room for a prompt's ids in a message between instances, besides its texts."""


def configure(environment: MindieEnvironment, server: ServerOptions) -> Setup:
    """Read config.json if the environment names one; raises MindieConfigError."""
    path = environment.mindie_config
    try:
        config = None if path is None else read_config(path)
    except MindieConfigError as error:
        raise MindieConfigError(f"{environment.config_variable}: {error}") from error
    try:
        addresses = plane_addresses(environment, config, server.host)
        between = inter_comm(environment, config, addresses["service"][0])
        files = {tls_files(config, name, path) for name, (_, port) in addresses.items() if port}
    except MindieConfigError as error:
        if path is None or error.of_environment:
            raise
        raise MindieConfigError(f"{environment.config_variable}: {path}: {error}") from error
    hosts = [host for host, _ in addresses.values()]
    between_tls = inter_comm_tls(config, path) if between else None

    def start(services: Services, terminate: Terminate) -> Parts:
        if config is None and not environment.mindie_port:
            return Parts()
        settings = wire_settings(config, environment, "{}:{}".format(*addresses["management"]))
        state = MindieState(settings, services.router, terminate)
        grpc = []
        if between is not None:
            state.instance = Instance(Peers(between_tls), between[1])
            # Where clients need certificates and no keys, other instances do too.
            scope = None if tls_files(config, "service", path) else "infer"
            timeouts = Timeouts(server.body_timeout_s, server.slow_client_timeout_s)
            size = settings.max_request_bytes + TOKEN_BYTES
            grpc = [
                GrpcListener(*between, calls, size, MAX_INSTANCES, between_tls, plain_text=between_tls is None)
                for calls in services_of(state, state.instance, services, timeouts, scope)
            ]
        planes = [
            PlaneListener(
                f"mindie-{name}",
                *addresses[name],
                routes=routes,
                max_body_bytes=settings.max_request_bytes,
                answer_headers=answer_headers,
                tls=tls_files(config, name, path),
                plain_text=config is not None and not config.ServerConfig.httpsEnabled,
            )
            for name, routes in route_sets(state).items()
        ]
        return Parts(planes, grpc, observers=[state.latency, state.metrics])

    listens = {port_setting(name, config): address for name, address in addresses.items()}
    if between is not None:
        listens[port_setting("inter_comm", config)] = between
    if config is None:
        return Setup(hosts, start=start, addresses=listens if environment.mindie_port else {})
    # maxLinkNum requests run at once, and twice as many may wait.
    limit, tls = 3 * config.ServerConfig.maxLinkNum, [each for each in (*files, between_tls) if each is not None]
    return Setup(hosts, limit, wanted_deployment(config), start, listens, tls)


def wanted_deployment(config: MindieConfig) -> WantedDeployment:
    """The deployment of config.json's one model, with its adapters."""
    modules = config.BackendConfig.ModelDeployConfig.LoraModules
    return WantedDeployment(
        source=config.model.modelWeightPath,
        name=config.model.modelName,
        engine_options=config.engine_options,
        adapters=[(module.name, module.path) for module in modules],
    )


DIALECT = Dialect("mindie", "MindIE", settings=MindieEnvironment, configure=configure)
