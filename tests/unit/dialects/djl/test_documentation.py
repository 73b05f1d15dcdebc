"""The page names every route of the plane."""

from __future__ import annotations

from inference.dialects.djl.lmi import LmiParameters
from inference.dialects.djl.routes import routes
from inference.dialects.djl.state import DjlState
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "djl.md").read_text()


def test_every_route_is_documented():
    for route in routes(DjlState()).routes:
        updates = route.method == "POST" and route.plain_path.endswith("/{adapter}")
        path = f"{route.plain_path}/update" if updates else route.plain_path
        assert f"`{route.method} {path}`" in PAGE, route.path


def test_every_parameter_is_documented():
    for name in LmiParameters.__struct_fields__:
        assert f"`parameters.{name}`" in PAGE, name
