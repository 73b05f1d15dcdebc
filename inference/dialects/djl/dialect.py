"""The declaration of DJL Serving's dialect. All its routes are on a plane of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.djl.routes import routes
from inference.dialects.djl.settings import DjlSettings
from inference.dialects.djl.state import DjlState
from inference.planes.declaration import Dialect, Parts, PlaneListener, Setup
from inference.vendors.model_server import answer_headers

if TYPE_CHECKING:
    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services


def configure(settings: DjlSettings, server: ServerOptions) -> Setup:
    """Configure the plane, which listens on the server's address."""

    def start(services: Services, terminate: Terminate) -> Parts:
        plane = PlaneListener(
            "djl", server.host, settings.djl_port, routes(DjlState()), server.max_body_bytes, answer_headers
        )
        return Parts([plane])

    return Setup(hosts=[server.host], start=start, addresses={"DRAGOMAN_DJL_PORT": (server.host, settings.djl_port)})


DIALECT = Dialect("djl", "DJL Serving", settings=DjlSettings, configure=configure)
