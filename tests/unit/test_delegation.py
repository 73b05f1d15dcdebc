"""A dialect's own plane serves a route of the front plane."""

from __future__ import annotations

import asyncio

import pytest

from inference.errors import InvalidRequest, MethodNotAllowed, RouteNotFound
from inference.http.exchange import Exchange
from inference.planes.delegation import Delegation

ASK = {"prompt": "The capital", "model": "demo", "max_tokens": 2}


class Client:
    """Collects what is sent to it."""

    def __init__(self, method: str = "POST") -> None:
        self.sent = []
        scope = {"method": method, "path": "/own", "headers": [(b"content-type", b"text/plain"), (b"x-mine", b"1")]}
        self.exchange = Exchange(scope, self._receive, self._send)
        self.exchange.tenant, self.exchange.answer_headers = "k1", [(b"x-own", b"2")]

    async def _receive(self):
        raise AssertionError("the body was read already")

    async def _send(self, message):
        self.sent.append(message)


async def waits():
    await asyncio.get_running_loop().create_future()


async def test_a_request_is_answered_as_the_front_plane_would(serving):
    client = Client()
    client.exchange._receive = waits
    await serving.services.delegation.run(client.exchange, "/v1/completions", ASK)
    head, body = client.sent
    assert (head["status"], client.exchange.status) == (200, 200)
    assert (b"x-own", b"2") in head["headers"]
    assert b"text_completion" in body["body"]
    assert serving.services.admission.in_flight == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/nothing", ASK, RouteNotFound),
        ("GET", "/v1/completions", ASK, MethodNotAllowed),
        ("POST", "/v1/completions", {**ASK, "temperature": 9}, InvalidRequest),
    ],
)
async def test_an_error_is_raised_and_nothing_is_sent(serving, method, path, body, error):
    client = Client(method)
    with pytest.raises(error):
        await serving.services.delegation.run(client.exchange, path, body)
    assert (client.sent, client.exchange.status) == ([], 0)


async def test_before_the_front_plane_exists():
    with pytest.raises(RouteNotFound):
        await Delegation().run(Client().exchange, "/v1/completions", ASK)
