"""The table of routes and keys in docs/security.md: it has every route, and each route is tried with a key of each role."""

from __future__ import annotations

import re
import subprocess
import sys

import grpc
import httpx
import pytest
from django.contrib import admin
from django.urls import get_resolver, resolve

from config.asgi import CONTROL_PATHS
from inference.dialects.torchserve import grpc_inference, grpc_open_inference
from inference.dialects.torchserve.protocol import inference_pb2 as torch
from inference.dialects.torchserve.protocol import open_inference_pb2 as opened
from inference.dialects.triton.protocol import grpc_service_pb2 as triton
from tests import calls
from tests.conftest import DEMO, ROOT
from tests.live import LiveServer, free_port, wait_until
from tools.docs.routes_table import PAGE, guarded_routes, written

pytestmark = pytest.mark.timeout(600)  # every route, and every kind of key

NO_KEY, DEPLOYMENTS = "no key", "a deployment's"
ROLES = {"`infer`": ["--scope", "infer"], "`metrics`": ["--scope", "metrics"], "`manage`": ["--scope", "manage"],
         DEPLOYMENTS: ["--deployment", "demo"]}  # fmt: skip
TRITON = "inference.GRPCInferenceService"
ENDING = "/stopService"
"""The route that ends the server: it is tried last."""


def documented() -> dict[tuple[str, str], frozenset[str]]:
    """The roles that the page says a plane's route is open to."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    header = next(line for line in lines if line[0] == "plane")
    found = {}
    for plane, *cells in (line for line in lines if len(line) >= len(header) and line[1] in ("", "yes")):
        roles = frozenset(role for role, cell in zip(header[1:-1], cells, strict=False) if cell == "yes")
        for route in re.findall(r"`([A-Za-z]+ /[^`]*)`", cells[len(header) - 2]):
            assert (plane, route) not in found, "two rows have one route"
            found[plane, route] = roles
    return found


TABLE = documented()


def test_the_table_has_every_route_once():
    page = PAGE.read_text()
    assert written(page) == page, "python -m tools.docs.routes_table writes it"
    assert set(TABLE) == {(route.plane, f"{route.method} {route.path}") for route in guarded_routes()}
    assert len(TABLE) > 250


def test_the_control_plane_has_no_other_routes():
    """Every URL of Django is the admin's, the API's of the table, or a refusal."""
    views = {resolve(path.replace("{id}", "0")).func.view_class for path in control_paths()}
    unknown = resolve("/sg_inf/a/b").func.view_class
    for pattern in get_resolver().url_patterns:
        for inner in getattr(pattern, "url_patterns", []):
            view = getattr(getattr(inner, "callback", None), "view_class", None)
            assert view in views | {unknown} or str(pattern.pattern) == "admin/", inner
    assert set(CONTROL_PATHS) == {"/admin", "/static/", "/ws/", "/sg_inf", "/secret", "/user/verify"}


def control_paths():
    return [route.partition(" ")[2] for plane, route in TABLE if plane == "control"]


class Walked:
    """A server with every plane, keys of every role, and a second deployment."""

    def __init__(self, folder) -> None:
        self.ports = {"torchserve-inference": free_port(), "torchserve-management": free_port(),
                      "torchserve-metrics": free_port(), "triton-metrics": free_port()}  # fmt: skip
        environment = {
            "DRAGOMAN_REQUIRE_API_KEY": "true",
            "DRAGOMAN_TORCHSERVE_INFERENCE_PORT": str(self.ports["torchserve-inference"]),
            "DRAGOMAN_TORCHSERVE_MANAGEMENT_PORT": str(self.ports["torchserve-management"]),
            "DRAGOMAN_TORCHSERVE_METRICS_PORT": str(self.ports["torchserve-metrics"]),
            "DRAGOMAN_TRITON_METRICS_PORT": str(self.ports["triton-metrics"]),
            "DRAGOMAN_TORCHSERVE_OPEN_INFERENCE_PROTOCOL": "true",
        }
        self.live = live = LiveServer(folder / "var", environment=environment)
        self.ports |= {"front": live.front_port, "control": live.control_port, "djl": live.djl_port,
                       "mindie-service": live.mindie_port, "mindie-management": live.management_port,
                       "mindie-metrics": live.metrics_port}  # fmt: skip
        self.keys: dict[str, str] = {}

    def run(self, *arguments: str) -> str:
        """The output of a command on the server's registry."""
        command = [sys.executable, "-W", "ignore", "manage.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.live.settings(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self) -> None:
        self.live.start()
        self.run("deploy", str(DEMO), "--name", "other")
        self.keys = {role: self.run("createkey", role, *options) for role, options in ROLES.items()}
        infer = self.headers("`infer`")

        def served() -> bool:
            answer = self.live.get("/v1/models", headers=infer)
            return answer.status_code == 200 and {"demo", "other"} <= {card["id"] for card in answer.json()["data"]}

        wait_until(served, 120, lambda: self.live.log)
        ask = {"model": "other", "prompt": "x", "max_tokens": 1}
        assert self.live.post("/v1/completions", ask, headers=infer).status_code == 200
        limited = self.headers(DEPLOYMENTS)
        wait_until(lambda: self.live.get("/v1/models", headers=limited).status_code == 200)

    def headers(self, role: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[role]}"} if role in self.keys else {}

    def call(self, client: httpx.Client, plane: str, method: str, path: str, headers: dict[str, str]) -> int:
        body = b"{}" if method in ("POST", "PUT", "PATCH") else None
        url = f"http://127.0.0.1:{self.ports[plane]}{path}"
        return client.request(method, url, content=body, headers=headers).status_code

    def grpc_port(self, method: str) -> int:
        live = self.live
        if "ManagementAPIsService" in method:
            return live.torchserve_management_port
        return live.grpc_port if method.startswith("/inference.") else live.torchserve_inference_port

    def grpc_call(self, method: str, metadata: dict[str, str]) -> grpc.StatusCode:
        """The status, OK as soon as there is an answer: some methods go on."""
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port(method)}") as channel:
            call = channel.stream_stream(method)(iter([b""]), metadata=tuple(metadata.items()), timeout=60)
            try:
                next(call)
            except StopIteration:
                return grpc.StatusCode.OK
            except grpc.RpcError as error:
                return error.code()
            call.cancel()
            return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    made = Walked(tmp_path_factory.mktemp("walked"))
    made.start()
    yield made
    if made.live.process.poll() is None:
        assert made.live.stop() == 0, made.live.log


def concrete(path: str, roles: frozenset[str]) -> str:
    """A path without parameters. What managers change is nothing that is there."""
    values = {"model": "demo" if "`infer`" in roles else "nothing", "version": "1.0", "wait": "-1", "path": "v1/models"}
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "nothing"), path)


def http_routes():
    for (plane, route), roles in TABLE.items():
        method, _, path = route.partition(" ")
        if plane != "gRPC":
            yield plane, method, concrete(path, roles), roles


def test_who_is_not_allowed_over_http(walked):
    given = {
        NO_KEY: {},
        "wrong": {"authorization": f"Bearer {walked.keys['`manage`'][:-1]}"},
        "another scheme": {"authorization": f"Basic {walked.keys['`manage`']}"},
        "in another case": {"authorization": f"Bearer {walked.keys['`manage`'].swapcase()}"},
    }
    with httpx.Client(timeout=60) as client:
        for plane, method, path, roles in http_routes():
            for role in ROLES:
                if role not in roles:
                    status = walked.call(client, plane, method, path, walked.headers(role))
                    assert status == 403, (plane, method, path, role)
            for name, headers in given.items():
                if NO_KEY not in roles:
                    assert walked.call(client, plane, method, path, headers) == 401, (plane, method, path, name)


def test_who_is_not_allowed_over_grpc(walked):
    for (plane, route), roles in TABLE.items():
        if plane != "gRPC":
            continue
        method = route.partition(" ")[2]
        for role in ROLES:
            if role not in roles:
                assert walked.grpc_call(method, walked.headers(role)) == grpc.StatusCode.PERMISSION_DENIED, (
                    route,
                    role,
                )
        for headers in ({}, {"authorization": "Bearer x.y"}):
            if NO_KEY not in roles:
                assert walked.grpc_call(method, headers) == grpc.StatusCode.UNAUTHENTICATED, route


def test_a_deployments_key_sees_no_other_deployment(walked):
    """The same calls find it with a key of all deployments."""
    ask = {"max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "x"}], **ask}
    asked = [
        ("front", "/v1/completions", {"model": "other", "prompt": "x", **ask}),
        ("front", "/v1/chat/completions", {"model": "other", **chat}),
        ("front", "/tokenize", {"model": "other", "prompt": "x"}),
        ("front", "/v2/models/other/generate", {"text_input": "x", "parameters": ask}),
        ("front", "/v2/models/other", None),
        ("front", "/v2/models/other/stats", None),
        ("front", "/v1/models/other", None),
        ("mindie-service", "/v1/chat/completions", {"model": "other", **chat}),
        ("mindie-service", "/v2/models/other", None),
        ("djl", "/predictions/other", {"inputs": "x", "parameters": {"max_new_tokens": 1}}),
        ("djl", "/invocations", {"model": "other", "prompt": "x", **ask}),
        ("torchserve-inference", "/predictions/other", {"prompt": "x", **ask}),
        ("torchserve-inference", "/predictions/other/1.0/v1/completions", {"model": "other", "prompt": "x", **ask}),
    ]
    for plane, path, body in asked:
        url = f"http://127.0.0.1:{walked.ports[plane]}{path}"
        method = "GET" if body is None else "POST"
        found = calls.request(method, url, json=body, headers=walked.headers("`infer`"), timeout=60)
        assert found.status_code == 200, (plane, path, found.text)
        hidden = calls.request(method, url, json=body, headers=walked.headers(DEPLOYMENTS), timeout=60)
        assert 400 <= hidden.status_code < 500, (plane, path, hidden.text)
        nothing = path.replace("other", "nothing")
        absent = None if body is None else {**body, **({"model": "nothing"} if "model" in body else {})}
        same = calls.request(
            method, url.replace(path, nothing), json=absent, headers=walked.headers(DEPLOYMENTS), timeout=60
        )
        told = re.sub(r"(?i)other|nothing", "*", f"{hidden.status_code} {hidden.text}")
        assert plain(told) == plain(re.sub(r"(?i)other|nothing", "*", f"{same.status_code} {same.text}")), (plane, path)
        own = path.replace("other", "demo")
        if body is not None and "model" in body:
            body = {**body, "model": "demo"}
        answer = calls.request(
            method, url.replace(path, own), json=body, headers=walked.headers(DEPLOYMENTS), timeout=60
        )
        assert answer.status_code == 200, (plane, path, answer.text)
    for plane, path in (("front", "/v1/models"), ("mindie-service", "/v1/models"), ("front", "/v2/models/stats")):
        url = f"http://127.0.0.1:{walked.ports[plane]}{path}"
        assert "other" in calls.get(url, headers=walked.headers("`infer`")).text
        assert "other" not in calls.get(url, headers=walked.headers(DEPLOYMENTS)).text


def test_a_deployments_key_sees_no_other_deployment_over_grpc(walked):
    live = walked.live
    predict = {"model_name": "other", "input": {"prompt": b"x", "max_tokens": b"1"}}
    body = triton.ModelInferRequest(model_name="other")
    body.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    asked = [
        (live.grpc_port, f"/{TRITON}/ModelMetadata", triton.ModelMetadataRequest(name="other")),
        (live.grpc_port, f"/{TRITON}/ModelInfer", body),
        (live.torchserve_inference_port, f"/{grpc_inference.SERVICE}/Predictions", torch.PredictionsRequest(**predict)),
        (live.torchserve_inference_port, f"/{grpc_inference.SERVICE}/StreamPredictions",
         torch.PredictionsRequest(**predict)),
        (live.torchserve_inference_port, f"/{grpc_open_inference.SERVICE}/ModelMetadata",
         opened.ModelMetadataRequest(name="other")),
    ]  # fmt: skip
    for port, method, request in asked:
        name = "model_name" if hasattr(request, "model_name") else "name"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(method, lambda m: m.SerializeToString())
            for role, model, found in (
                ("`infer`", "other", True), (DEPLOYMENTS, "demo", True), (DEPLOYMENTS, "other", False),
            ):  # fmt: skip
                setattr(request, name, model)
                metadata = tuple(walked.headers(role).items())
                if found:
                    assert list(call(request, metadata=metadata, timeout=60)), (method, role, model)
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    list(call(request, metadata=metadata, timeout=60))
                hidden = (refused.value.code(), refused.value.details().replace(model, "*"))
                setattr(request, name, "nothing")
                with pytest.raises(grpc.RpcError) as refused:
                    list(call(request, metadata=metadata, timeout=60))
                assert hidden == (refused.value.code(), refused.value.details().replace("nothing", "*")), method


def plain(text: str) -> str:
    """Without what differs from one answer to the next: ids and times."""
    return re.sub(r"[0-9a-f]{8,}|\d{6,}", "#", text)


def test_no_key_opens_the_admin(walked):
    with httpx.Client(base_url=walked.live.admin_url) as client:
        for role in (NO_KEY, *ROLES):
            headers = walked.headers(role)
            for model in admin.site._registry:
                page = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
                for path in (page, f"{page}add/", f"{page}1/change/"):
                    answer = client.get(path, headers=headers)
                    assert (answer.status_code, "/admin/login/" in answer.headers["location"]) == (302, True), path
            refused = client.post("/admin/management/apikey/add/", data={"name": "x"}, headers=headers)
            assert refused.status_code in (302, 403)


def test_who_is_allowed(walked):
    with httpx.Client(timeout=60) as client:
        last = []
        for plane, method, path, roles in http_routes():
            for role in (NO_KEY, *ROLES):
                if role not in roles:
                    continue
                call = (client, plane, method, path, walked.headers(role))
                if path == ENDING:
                    last.append(call)
                    continue
                assert walked.call(*call) not in (401, 403), (plane, method, path, role)
        for (plane, route), roles in TABLE.items():
            for role in roles if plane == "gRPC" else ():
                status = walked.grpc_call(route.partition(" ")[2], walked.headers(role))
                refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                assert status not in refusals, (route, role)
        assert [walked.call(*call) for call in last] == [200]
    assert walked.live.process.wait(60) == 0, walked.live.log
