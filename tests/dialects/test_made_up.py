"""A dialect is one folder and one line: a made-up one, with a plane and a gRPC service of its own, in a real server."""

from __future__ import annotations

import sys

import grpc
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import calls
from tests.live import LiveServer, free_port

pytestmark = [pytest.mark.full, pytest.mark.live]

# What `manage.py serve` does after the dialect's folder and its line in `inference/dialects/__init__.py` were added.
SERVE = """
from inference import dialects
dialects.__path__.append("tests/dialects")
dialects.DIALECTS += ("made_up",)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "serve"])
"""


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def made_up(tmp_path_factory, port):
    grpc_port = free_port()
    environment = {
        "DJANGO_SETTINGS_MODULE": "config.settings",
        "DRAGOMAN_MADE_UP_PORT": str(port),
        "DRAGOMAN_MADE_UP_GRPC_PORT": str(grpc_port),
    }
    data = tmp_path_factory.mktemp("made_up") / "var"
    server = LiveServer(
        data, environment=environment, grpc_port=grpc_port, program=[sys.executable, "-W", "ignore", "-c", SERVE]
    ).start()
    yield server
    assert server.stop() == 0, server.log


def test_its_route_on_the_front_plane_answers(made_up):
    assert made_up.post("/made-up/echo", {"text": "hello"}).json() == {"echo": "hello"}


def test_its_own_plane_answers(made_up, port):
    answer = calls.get(f"http://127.0.0.1:{port}/models")
    assert (answer.json(), answer.headers["x-made-up"]) == (["demo"], "1")


def test_it_generates_whole_and_streamed(made_up, port):
    url, body = f"http://127.0.0.1:{port}/complete", {"text": "The capital of France is"}
    whole = calls.post(url, json=body, timeout=60).json()["completion"]
    streamed = calls.post(url, json={**body, "stream": True}, timeout=60)
    assert whole
    assert (streamed.text, streamed.headers["content-type"]) == (f"{whole}.", "text/plain")
    refused = calls.post(url, json={"text": "The capital " * 4000, "stream": True}, timeout=60)
    assert (refused.status_code, refused.json()) == (422, {"made_up_problem": "PromptTooLong"})


def test_errors_have_its_own_shape(made_up, port):
    refused = made_up.post("/made-up/echo", {})
    assert (refused.status_code, refused.json()) == (422, {"made_up_problem": "InvalidRequest"})
    for url in (f"{made_up.url}/made-up/nothing", f"http://127.0.0.1:{port}/nothing"):
        unknown = calls.get(url)
        assert (unknown.status_code, unknown.json()) == (404, {"made_up_problem": "RouteNotFound"})
    assert calls.get(f"{made_up.url}/nothing").json().keys() != {"made_up_problem"}


def test_two_dialects_share_a_grpc_port(made_up):
    with grpc.insecure_channel(f"127.0.0.1:{made_up.grpc_port}") as channel:
        assert channel.unary_unary("/made.Up/Say")(b"hello", timeout=60) == b"HELLO"
        live = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            request_serializer=pb.ServerLiveRequest.SerializeToString,
            response_deserializer=pb.ServerLiveResponse.FromString,
        )
        assert live(pb.ServerLiveRequest(), timeout=60).live


def test_its_routes_are_in_the_documentation(made_up):
    operation = made_up.get("/openapi.json").json()["paths"]["/made-up/echo"]["post"]
    assert (operation["tags"], operation["summary"]) == (["made_up"], "Echo a text")
    assert "422" in operation["responses"]


def test_a_setting_of_its_own_is_checked_at_start(tmp_path):
    environment = {"DJANGO_SETTINGS_MODULE": "config.settings", "DRAGOMAN_MADE_UP_PORT": "70000"}
    server = LiveServer(
        tmp_path / "var", environment=environment, program=[sys.executable, "-W", "ignore", "-c", SERVE]
    ).start(wait=False)
    assert server.process.wait(60) == 1
    assert "DRAGOMAN_MADE_UP_PORT: Input should be less than or equal to 65535" in server.log
