"""The declaration of MindIE's dialect. All its routes are on three planes of its own; config.json may configure them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.mindie.config_file import read_config, wire_settings
from inference.dialects.mindie.environment import MindieEnvironment
from inference.dialects.mindie.listeners import plane_addresses, tls_files
from inference.dialects.mindie.routes import answer_headers, route_sets
from inference.dialects.mindie.state import MindieState
from inference.planes.declaration import Dialect, Parts, PlaneListener, Setup, WantedDeployment

if TYPE_CHECKING:
    from inference.dialects.mindie.config_file import MindieConfig
    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services


def configure(environment: MindieEnvironment, server: ServerOptions) -> Setup:
    """Read config.json if the environment names one; raises MindieConfigError."""
    path = environment.mindie_config
    config = None if path is None else read_config(path)
    addresses = plane_addresses(environment, config, server.host)
    hosts = [host for host, _ in addresses.values()]

    def start(services: Services, terminate: Terminate) -> Parts:
        if config is None and not environment.mindie_port:
            return Parts()
        settings = wire_settings(config, environment, "{}:{}".format(*addresses["management"]))
        state = MindieState(settings, services.router, terminate)
        planes = [
            PlaneListener(
                f"mindie-{name}",
                *addresses[name],
                routes=routes,
                max_body_bytes=settings.max_request_bytes,
                answer_headers=answer_headers,
                tls=tls_files(config, name, path),
            )
            for name, routes in route_sets(state).items()
        ]
        return Parts(planes, observers=[state.latency, state.metrics])

    if config is None:
        return Setup(hosts, start=start)
    # maxLinkNum requests run at once, and twice as many may wait.
    return Setup(hosts, 3 * config.ServerConfig.maxLinkNum, wanted_deployment(config), start)


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
