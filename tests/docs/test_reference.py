"""The pages that list things list all of them: routes, metrics, error codes, commands, flags, keys of configuration files."""

from __future__ import annotations

import inspect
import re
import xml.dom.minidom

import pytest
from django.core.management import get_commands
from opentelemetry.sdk.metrics import MeterProvider
from pydantic import BaseModel

from config.command_line import WITHOUT_DJANGO
from config.help import GROUPS, help_text
from config.options import Options
from config.serve_flags import FLAGS, REFUSED
from engine.adapters.failures import AdapterCode
from engine.config import OPTIONS
from engine.failures import ExitStatus, FailureCode
from inference import errors
from inference.dialects import declared_dialects
from inference.dialects.mindie import config_file
from inference.telemetry.spans import OpenTelemetry
from tests import calls
from tests.conftest import ROOT
from tests.docs.test_docs import environment_variables
from tests.live import LiveServer, free_port
from tools.docs import errors_table
from tools.docs.routes_table import guarded_routes

DOCS = ROOT / "docs"
TROUBLESHOOTING, METRICS = ((DOCS / f"{name}.md").read_text() for name in ("troubleshooting", "metrics"))
MIGRATIONS = sorted((DOCS / "migrate").glob("*.md"))
PAGES = {"djl": "djl", "mindie": "mindie", "torchserve": "torchserve", "control": "scalegenai", "gRPC": ""}
"""The page of a plane's routes, by the beginning of its name; the others are on the page of dialects."""
EVERYWHERE = ("/docs", "/openapi.json", "/api-doc/openapi.json", "/metrics")
"""Paths that are no dialect's."""


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first columns of the tables below a heading."""
    part = re.split(r"^## ", page, flags=re.M)
    section = next(text for text in part if text.startswith(heading))
    rows = re.findall(r"^\| ([^|]*) \|", section, re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_route_is_on_the_page_of_its_plane():
    shared = "".join((DOCS / f"{name}.md").read_text() for name in ("dialects", "torchserve"))
    missing = []
    for route in guarded_routes():
        name = next((page for start, page in PAGES.items() if route.plane.startswith(start)), "dialects")
        page = (DOCS / f"{name}.md").read_text() if name else shared
        if route.method == "gRPC":
            service, call = route.path.strip("/").split("/")
            written = service in page and (service.startswith("grpc.") or re.search(rf"\b{call}\b", page))
        else:
            path = route.path.replace("/versions/{version}", "")
            path += "/update" if route.plane == "djl" and path.endswith("/{adapter}") and route.method == "POST" else ""
            written = any(f"{before}{path}`" in page for before in (f"`{route.method} ", "`", f"{route.method}`, `"))
        if not written and not route.path.startswith(EVERYWHERE):
            missing.append(f"{route.plane}: {route.method} {route.path}")
    assert not missing


@pytest.fixture(scope="module")
def planes(tmp_path_factory):
    """A server with every page of metrics, and the addresses of these."""
    triton, torchserve = free_port(), free_port()
    environment = {
        "DRAGOMAN_TRITON_METRICS_PORT": str(triton),
        "DRAGOMAN_TORCHSERVE_METRICS_PORT": str(torchserve),
        "MIES_SERVICE_MONITOR_MODE": "1",
        "DRAGOMAN_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
    }
    live = LiveServer(tmp_path_factory.mktemp("metrics") / "var", environment=environment).start()
    addresses = {
        "front": f"{live.url}/metrics",
        "triton": f"http://127.0.0.1:{triton}/metrics",
        "torchserve": f"http://127.0.0.1:{torchserve}/metrics",
        "djl": f"{live.djl_url}/server/metrics",
        "mindie": f"{live.metrics_url}/metrics",
    }
    yield addresses
    assert live.stop() == 0, live.log


def families(address: str) -> set[str]:
    """The names on a page of metrics, without the times at which prometheus_client began to count."""
    names = re.findall(r"^# TYPE (\S+) ", calls.get(address, timeout=60).text, re.M)
    return {name for name in names if not name.endswith("_created")}


@pytest.mark.full
def test_the_page_has_every_metric_and_no_other(planes):
    found = {name: families(address) for name, address in planes.items()}
    headings = ("This server's own", "vLLM's names", "TGI's names")
    assert set().union(*(first_cells(METRICS, heading) for heading in headings)) == found["front"]
    assert found["djl"] == found["front"]
    section = METRICS[METRICS.index("## Planes of their own") :]
    assert found["triton"] - found["front"] == set(re.findall(r"`(nv_\w+)`", section))
    assert found["torchserve"] == set(re.findall(r"`(ts_\w+)`", section))
    names = first_cells(METRICS, "Planes of their own")
    assert {name for name in names if name.islower()} == found["mindie"]


def test_the_expressions_of_the_page_have_metrics_that_exist(planes):
    found = families(planes["front"])
    section = METRICS[METRICS.index("## What to watch") : METRICS.index("## This server's own")]
    named = set(re.findall(r"\b((?:vllm:|tgi_|dragoman_)\w+)", section))
    assert len(named) > 8
    assert {name for name in named if name not in found and name.removesuffix("_bucket") not in found} == set()


def test_the_page_has_the_metrics_of_opentelemetry():
    telemetry = OpenTelemetry(None, MeterProvider())
    instruments = (telemetry._duration, telemetry._first_token, telemetry._per_token)
    assert {each.name for each in instruments} == set(re.findall(r"`(gen_ai\.\S+)`", METRICS))


def test_every_error_of_a_request_is_explained():
    classes = {
        name
        for name, member in inspect.getmembers(errors, inspect.isclass)
        if issubclass(member, errors.ServingError) and member is not errors.ServingError
    }
    assert first_cells(TROUBLESHOOTING, "Errors of requests") == classes


def test_every_code_of_a_failure_is_explained():
    assert first_cells(TROUBLESHOOTING, "Failures in the engine") == {str(code) for code in FailureCode}
    assert first_cells(TROUBLESHOOTING, "Adapters") == {str(code) for code in AdapterCode}
    statuses = re.findall(r"^\| (\d+) \|", TROUBLESHOOTING, re.M)
    assert [int(status) for status in statuses] == [int(status) for status in ExitStatus]


def test_the_table_of_statuses_is_that_of_the_dialects():
    assert errors_table.written(TROUBLESHOOTING) == TROUBLESHOOTING, "python -m tools.docs.errors_table writes it"
    assert "| `Overloaded` | 503 | 429 | 503, UNAVAILABLE | 503 |" in TROUBLESHOOTING


def test_every_command_is_documented():
    pages = "".join(page.read_text() for page in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    ours = {name for name, app in get_commands().items() if app.startswith(("config", "management"))} | {"doctor"}
    assert {"serve", "web", "reconcile", "deploy", "status", "flight", "createkey"} <= ours
    for name in ours:
        assert re.search(rf"(?:manage\.py|dragoman) {name}\b", pages), name


def test_help_lists_every_command_of_ours_in_lines_of_80_columns():
    ours = {name for name, app in get_commands().items() if app.startswith(("config", "management"))} | {
        *WITHOUT_DJANGO
    }
    listed = {name for group in GROUPS.values() for name in group}
    assert ours <= listed
    assert listed - ours == {"migrate", "createsuperuser"}
    assert all(len(line) <= 80 for line in help_text("dragoman").splitlines())


def test_every_flag_of_serve_is_on_the_page_of_vllm():
    page = (DOCS / "migrate" / "vllm.md").read_text()
    for name in [*(name for flag in FLAGS for name in flag.names), *REFUSED]:
        assert f"`{name}`" in page, name
    for flag in FLAGS:
        assert f"`{flag.setting.upper()}`" in page or f"`{flag.option}`" in page or not (flag.setting or flag.option)


def test_every_key_of_mindies_configuration_is_on_its_page():
    page = (DOCS / "migrate" / "mindie.md").read_text()
    sections = [each for _, each in inspect.getmembers(config_file, inspect.isclass) if issubclass(each, BaseModel)]
    keys = {key for section in sections for key in section.model_fields}
    assert len(keys) > 60
    assert {key for key in keys if f"`{key}`" not in page} == set()


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.stem)
def test_the_settings_and_options_that_a_migration_names_exist(page):
    settings = {Options, *(dialect.settings for dialect in declared_dialects() if dialect.settings is not None)}
    variables = {variable for each in settings for variable in environment_variables(each)}
    text = page.read_text()
    named = set(re.findall(r"\bDRAGOMAN_[A-Z_]+", text))
    assert named <= variables, named - variables
    here = re.findall(r"^\|[^|]*\| ([^|]*)", text[text.index("## What behaves differently") :], re.M)
    upper = {name for cell in here for name in re.findall(r"`(?:DRAGOMAN_)?([A-Z][A-Z_]{3,})(?:=\w+)?`", cell)}
    others = {
        "NAME",
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "OTEL_SERVICE_NAME",
        "MIES_CONTAINER_IP",
        "MIES_CONTAINER_MANAGEMENT_IP",
    }
    assert {name for name in upper - others if f"DRAGOMAN_{name}" not in variables} == set()
    options = {name for cell in here for name in re.findall(r"option `(\w+)`", cell)}
    assert options <= set(OPTIONS)


def test_a_guide_from_each_vendor_is_there_and_the_index_leads_to_every_page():
    assert [page.stem for page in MIGRATIONS] == ["djl", "mindie", "tgi", "torchserve", "vllm"]
    index = (DOCS / "README.md").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert f"]({name})" in index or f"]({name}#" in index or name.startswith("adr/") or name == "README.md", name


def test_the_picture_of_the_architecture_names_every_plane():
    picture = (DOCS / "pictures" / "architecture.svg").read_text()
    document = xml.dom.minidom.parseString(picture)
    texts = " ".join(node.firstChild.data for node in document.getElementsByTagName("text"))
    for dialect in declared_dialects():
        assert dialect.title in texts, dialect.title
    ports = {name: field.default for name, field in Options.model_fields.items() if name.endswith("_port")}
    for dialect in declared_dialects():
        fields = {} if dialect.settings is None else dialect.settings.model_fields
        ports |= {name: field.default for name, field in fields.items() if name.endswith("_port") and field.default}
    assert len(ports) > 6
    shown = set(re.findall(r":(\d{4})", texts))
    assert {str(port) for port in ports.values()} - {"1026"} == shown
