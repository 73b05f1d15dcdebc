"""The front plane's own routes: Prometheus metrics and the API documentation."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any

from inference.errors import Forbidden, InternalError, MethodNotAllowed, RouteNotFound, ServingError, Unauthorized
from inference.http.exchange import Response, json_response
from inference.http.openapi import document, of_vendor
from inference.http.routing import Described, Route, RouteSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.http.exchange import Exchange
    from inference.http.routing import Handler
    from inference.services import Services

STATUSES = {RouteNotFound: 404, MethodNotAllowed: 405, Unauthorized: 401, Forbidden: 403, InternalError: 500}
ASSETS = {
    "swagger-ui.css": b"text/css",
    "swagger-ui-bundle.js": b"text/javascript",
    "favicon-32x32.png": b"image/png",
}
SCRIPT = b'SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui"})'
PAGE = (
    b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Dragoman API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css"><link rel="icon" href="/docs/favicon-32x32.png"></head>
<body><div id="ui"></div><script src="/docs/swagger-ui-bundle.js"></script>
<script>%b</script></body></html>"""
    % SCRIPT
)
POLICY = (
    b"default-src 'self'; script-src 'self' 'sha256-%b'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
) % b64encode(sha256(SCRIPT).digest())


async def metrics(exchange: Exchange, services: Services) -> None:
    """GET /metrics: the request metrics and the engine metrics."""
    await exchange.respond(Response(200, services.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8"))


async def docs(exchange: Exchange, services: Services) -> None:
    """GET /docs: the page that shows /openapi.json."""
    headers = [(b"content-security-policy", POLICY)]
    await exchange.respond(Response(200, PAGE, b"text/html; charset=utf-8", headers))


async def asset(exchange: Exchange, services: Services) -> None:
    """Script and style of the documentation page, from the installed package: no other site is contacted."""
    name = exchange.parameters["name"]
    if name not in ASSETS:
        raise RouteNotFound("Not Found")
    root = resources.files("drf_spectacular_sidecar") / "static" / "drf_spectacular_sidecar" / "swagger-ui-dist"
    await exchange.respond(Response(200, (root / name).read_bytes(), ASSETS[name]))


def operation_routes(fronts: Mapping[str, RouteSet]) -> RouteSet:
    """The metrics and documentation routes; `fronts` maps dialect names to the routes to document."""

    async def openapi(exchange: Exchange, services: Services) -> None:
        await exchange.respond(json_response(document({**fronts, "operations": routes}, services.version)))

    def vendors(name: str) -> Handler:
        async def handler(exchange: Exchange, services: Services) -> None:
            await exchange.respond(json_response(of_vendor({**fronts, "operations": routes}, name, services.version)))

        return handler

    def public(path: str, handler: Handler, summary: str, described: Described) -> Route:
        return Route("GET", path, handler, _render, summary, scope=None, described=described)

    page, json = Described(answer=str, kind="text/html"), Described(answer=dict[str, Any])
    text = "List the metrics in the Prometheus format"
    own = (
        Route("GET", "/metrics", metrics, _render, text, "metrics", described=Described(answer=str, kind="text/plain")),
        public("/docs", docs, "Show this documentation", page),
        public("/docs/", docs, "Show this documentation", page),
        public("/docs/{name}", asset, "Get a file of the documentation page", Described(answer=bytes, kind="*/*")),
        public("/openapi.json", openapi, "Get this documentation as OpenAPI", json),
        *(
            public(front.document.path, vendors(name), f"Get the documentation of {front.document.title}", json)
            for name, front in fronts.items()
            if front.document is not None
        ),
    )
    routes = RouteSet(own, _render, frozenset(STATUSES.values()))
    return routes


def _render(error: ServingError) -> Response:
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    return json_response({"error": error.message}, status)
