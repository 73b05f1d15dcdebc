"""Every panel of our dashboard, every alert, and every panel of the dashboards that vLLM and TGI publish finds its series on the
metrics page of a real server, with the labels that our Prometheus gives to it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import calls
from tests.conftest import ROOT
from tests.deploy.promql import Selector, read, series, shortcomings, substituted
from tests.live import LiveServer, free_port
from tests.waiting import wait_until

PUBLISHED = Path(__file__).parent / "published"
CONFIGURATION = ROOT / "deploy" / "prometheus" / "prometheus.yml"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
PROMPT = "Question: What is the capital of France?\nAnswer:"
READY_S = 300
VALUES = {"model_name": "demo", "Deployment_id": "demo", "model": ".*", "service": "dragoman"}


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield " ".join(value["expr"].split())
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from expressions(inner)


def cases() -> list[tuple[str, str]]:
    """(where it stands, expression)."""
    ours = [
        (file.stem, text) for file in DASHBOARDS.glob("*.json") for text in expressions(json.loads(file.read_text()))
    ]
    alerts = [("alerts", text) for text in expressions(yaml.safe_load(ALERTS.read_text()))]
    theirs = [
        (file.stem, line)
        for file in sorted(PUBLISHED.glob("*.txt"))
        for line in file.read_text().splitlines()
        if not line.startswith("#")
    ]
    return list(dict.fromkeys([*ours, *alerts, *theirs]))


CASES = cases()
pytestmark = pytest.mark.timeout(2 * READY_S)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory):
    redis = {"DRAGOMAN_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}  # its metric is there when it is not
    server = LiveServer(tmp_path_factory.mktemp("dashboards") / "var", environment=redis).start(wait=False)
    try:
        server.wait_ready(READY_S)
        traffic(server)
        yield server
    finally:
        status = server.stop()
    assert status == 0, server.log


def traffic(server: LiveServer) -> None:
    """Requests of several kinds, one of them refused."""
    for _ in range(3):
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}).status_code == 200
        assert server.post("/generate", {"inputs": PROMPT, "parameters": {"temperature": -1}}).status_code == 422


@pytest.fixture(scope="module")
def found(live: LiveServer) -> list[dict[str, str]]:
    """The series as Prometheus stores them: with the labels of the target, and `up`."""
    target = {"job": "dragoman", "instance": "web:8000", **static_labels()}
    return [*series(live.get("/metrics").text, target), {"__name__": "up", **target}]


def static_labels() -> dict[str, str]:
    """What relabelling adds to every series."""
    [job] = yaml.safe_load(CONFIGURATION.read_text())["scrape_configs"]
    assert job["job_name"] == "dragoman"
    return {rule["target_label"]: rule["replacement"] for rule in job["relabel_configs"]}


@pytest.mark.full
@pytest.mark.parametrize(("where", "expression"), CASES, ids=lambda text: text[:90])
def test_every_panel_finds_its_series(found, where, expression):
    assert shortcomings(substituted(expression, VALUES), found) == []


def test_all_dashboards_are_read():
    counts = {where: sum(case[0] == where for case in CASES) for where in dict(CASES)}
    assert counts.keys() == {
        "dragoman", "alerts", "tgi_grafana", "vllm_grafana", "vllm_performance_statistics", "vllm_query_statistics"
    }  # fmt: skip
    assert min(counts.values()) >= 6
    assert counts["tgi_grafana"] == 54


def test_what_would_be_missed(found):
    for text in (
        "vllm:no_such_metric",
        'vllm:num_requests_running{model_name="other"}',
        'rate(tgi_request_count{container!="dragoman"}[1m])',
        "sum by (no_such_label) (vllm:num_requests_running)",
    ):
        assert shortcomings(text, found), text
    asked = read(
        'sum(rate(a:b_total{x=~"y.*", z!="1"}[5m])) by (x) / on (x) group_left (k) count without (q) (c) > 0.5'
    )
    assert asked.selectors == (Selector("a:b_total", (("x", "=~", "y.*"), ("z", "!=", "1"))), Selector("c", ()))
    assert asked.groupings == {"x", "k", "q"}
    for text in ("5 + 3", "a{b}", "a ? b"):
        with pytest.raises(ValueError, match=r".+"):
            read(text)


def test_grafana_finds_the_dashboard_and_the_data(found):
    [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "dashboards.yml").read_text())["providers"]
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    mounts = {path: source for source, path, _ in services_volumes("grafana")}
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    for file in DASHBOARDS.glob("*.json"):
        board = json.loads(file.read_text())
        names = {variable["name"] for variable in board["templating"]["list"]}
        assert {
            variable["current"]["value"] for variable in board["templating"]["list"] if variable["type"] == "datasource"
        } == {source["uid"]}
        used = set("".join(expressions(board)).split("$")[1:])
        assert names >= {"datasource", "model"}
        assert all(text.startswith(("__rate_interval", "model")) for text in used)
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))


def services_volumes(name: str) -> list[tuple[str, str, bool]]:
    from tests.deploy.compose import services

    return services()[name].volumes


@pytest.mark.full
def test_a_real_prometheus_evaluates_every_expression(live, tmp_path):
    """It scrapes the server by our configuration, but for the address; afterwards no expression is refused, and every one whose
    series are scraped has a value.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus is installed on this machine")
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    [job] = configuration["scrape_configs"]
    del job["dns_sd_configs"], job["authorization"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{live.front_port}"]}]
    configuration["global"]["scrape_interval"] = "1s"
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    shutil.copy(ALERTS, tmp_path)
    port = free_port()
    command = [program, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query"

        def ask(expression: str) -> Any:
            try:
                answer = calls.get(url, params={"query": expression}, timeout=60)
            except httpx.TransportError:
                return None
            assert answer.status_code == 200, (expression, answer.text)
            return answer.json()["data"]["result"]

        wait_until(lambda: bool(ask("count_over_time(up[10m]) >= 2")), 120, (tmp_path / "log").read_text)
        traffic(live)
        counted = "sum(increase(vllm:request_success_total[5m])) > 0 and sum(increase(tgi_request_count[5m])) > 0"
        wait_until(lambda: bool(ask(counted)), 60, (tmp_path / "log").read_text)
        empty = []
        for where, expression in CASES:
            if where != "alerts" and not ask(substituted(expression, VALUES)):
                empty.append((where, expression))
        assert not empty
    finally:
        process.terminate()
        process.wait(60)
