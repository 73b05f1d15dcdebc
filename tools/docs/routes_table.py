"""Write the table of routes and who may call them in docs/security.md, from the routes themselves.

python -m tools.docs.routes_table
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.server import Server  # first: installs the asyncio reactor

# isort: split
from django.urls import resolve

from config.control import EmbeddedControl
from config.options import Options
from inference.dialects import declared_dialects
from inference.planes.plane import Plane
from inference.server.grpc_calls import Calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.planes.declaration import Dialect, Setup

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- Written by `python -m tools.docs.routes_table`. -->\n", "<!-- To here. -->\n"
ROLES = ("no key", "`infer`", "`metrics`", "`manage`", "a deployment's")
OPENED_BY = {
    None: frozenset(ROLES),
    "infer": frozenset({"`infer`", "a deployment's"}),
    "metrics": frozenset({"`metrics`"}),
    "manage": frozenset({"`manage`"}),
    "token": frozenset(),
}
"""The roles that each scope opens a route to; `token` is TorchServe's own key."""
CONTROL_PATHS = (
    "/sg_inf/openapi.json", "/sg_inf/list", "/sg_inf/create", "/sg_inf/supported_models", "/sg_inf/{id}",
    "/sg_inf/{id}/update", "/sg_inf/{id}/scale/up", "/sg_inf/{id}/scale/zero", "/sg_inf/{id}/gpu_nodes_ips",
    "/secret/AUTH_ENDPOINT_KEY_{id}", "/user/verify",
)  # fmt: skip
"""The paths of the control plane's API; the admin takes no keys."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class Guarded:
    """One route of a plane, or one gRPC method; `scope` is what a key must have, None: no key is needed."""

    plane: str
    method: str
    path: str
    scope: str | None

    @property
    def text(self) -> str:
        """As the table has it."""
        return f"`{self.method} {self.path}`"


def guarded_routes() -> list[Guarded]:
    """Every route and gRPC method of a server with all planes."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(data_dir=Path(folder))
        declared = declared_dialects()
        setups = list(_set_up(declared, options))
        listeners = Server(options, declared, setups, EmbeddedControl(options)).listeners
    found = []
    for planes in listeners.planes.values():
        found += [
            Guarded(plane.name, route.method, route.plain_path, route.scope)
            for plane in planes[:1]  # deployments' own addresses have the front plane's routes
            if isinstance(plane, Plane)
            for route in plane.table.routes
        ]
    for services in listeners.grpc.values():
        for service in services:
            if isinstance(service.handler, Calls):
                found += [Guarded("gRPC", "gRPC", path, scope) for path, scope in service.handler.scopes.items()]
    return list(dict.fromkeys([*found, *_control_routes()]))


def _set_up(declared: tuple[Dialect, ...], options: Options) -> Iterator[Setup]:
    """The dialects with all of their planes and services, each on a port of its own."""
    port = options.control_port
    for dialect in declared:
        fields: dict[str, Any] = {}
        for name in () if dialect.settings is None else dialect.settings.model_fields:
            if name.endswith("_port"):
                fields[name] = port = port + 1
            elif name.endswith("_protocol"):
                fields[name] = True
        yield dialect.configure(None if dialect.settings is None else dialect.settings(**fields), options)


def _control_routes() -> Iterator[Guarded]:
    for path in CONTROL_PATHS:
        view: Any = resolve(path.replace("{id}", "0")).func
        for method in METHODS:
            if hasattr(view.view_class, method.lower()):
                yield Guarded("control", method, path, None if view.view_class.public else "manage")


def table() -> str:
    """A row for each plane and scope."""
    rows: dict[tuple[str, str | None], list[str]] = {}
    for route in guarded_routes():
        rows.setdefault((route.plane, route.scope), []).append(route.text)
    lines = [f"| plane | {' | '.join(ROLES)} | routes |", "| --- |" + " --- |" * (len(ROLES) + 1)]
    for (plane, scope), texts in rows.items():
        cells = ["yes" if role in OPENED_BY[scope] else "" for role in ROLES]
        lines.append(f"| {plane} | {' | '.join(cells)} | {', '.join(texts)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    return place.sub(lambda _: BEGIN + table() + END, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
