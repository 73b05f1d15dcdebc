from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from pydantic import Field

from inference.errors import InvalidRequest, RouteNotFound, ServingError
from inference.generation.answer import Job, Reply, StreamFormat, answer, preparing
from inference.generation.requests import GenerationRequest, SamplingOverrides, TextPrompt
from inference.http.exchange import Response, json_response
from inference.http.routing import Route, RouteSet
from inference.planes.declaration import Dialect, DialectSettings, GrpcListener, Parts, PlaneListener, Setup

if TYPE_CHECKING:
    from inference.generation.deltas import Delta
    from inference.http.exchange import Exchange, Headers
    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services


STATUSES = frozenset({404, 422})
STREAM = StreamFormat([(b"content-type", b"text/plain")], lambda error: type(error).__name__.encode(), end=b".")


class MadeUpSettings(DialectSettings):
    made_up_port: int = Field(0, ge=0, le=65535)
    made_up_grpc_port: int = Field(0, ge=0, le=65535)


def render(error: ServingError) -> Response:
    return json_response({"made_up_problem": type(error).__name__}, 404 if isinstance(error, RouteNotFound) else 422)


async def echo(exchange: Exchange, services: Services) -> None:
    body = await exchange.json()
    if "text" not in body:
        raise InvalidRequest("text is missing", "text")
    await exchange.respond(json_response({"echo": body["text"]}))


async def complete(exchange: Exchange, services: Services) -> None:
    with services.admission.permit(exchange.tenant):
        body = await exchange.json()
        if not isinstance(body.get("text"), str):
            raise InvalidRequest("text must be a string", "text")
        request = GenerationRequest(
            model=None, prompt=TextPrompt(body["text"]), sampling=SamplingOverrides(temperature=0.0), max_tokens=8
        )
        stream = STREAM if body.get("stream") else None
        await answer(
            exchange, Job(preparing([request], exchange, services, "made_up"), lambda _: CompletionReply(), stream)
        )


class CompletionReply(Reply):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def chunks(self, delta: Delta) -> list[bytes]:
        return [delta.text.encode()] if delta.text else []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)

    def whole(self) -> Response:
        return json_response({"completion": "".join(self._texts)})


async def models(exchange: Exchange, services: Services) -> None:
    await exchange.respond(json_response([target.entry.name for target in services.router.targets]))


async def say(request: bytes, context: Any) -> bytes:
    return request.upper()


def answer_headers(path: str, request_id: str) -> Headers:
    return [(b"x-made-up", b"1")]


def configure(settings: MadeUpSettings, server: ServerOptions) -> Setup:
    def start(services: Services, terminate: Terminate) -> Parts:
        routes = RouteSet(
            (
                Route("GET", "/models", models, render, "List the models"),
                Route("POST", "/complete", complete, render, "Complete a text", needs_permit=True),
            ),
            render,
            STATUSES,
        )
        plane = PlaneListener("made-up", server.host, settings.made_up_port, routes, 1 << 20, answer_headers)
        handler = grpc.method_handlers_generic_handler("made.Up", {"Say": grpc.unary_unary_rpc_method_handler(say)})
        service = GrpcListener(server.host, settings.made_up_grpc_port, handler, 1 << 20, 16)
        return Parts([plane], [service])

    return Setup(start=start)


DIALECT = Dialect(
    "made_up",
    "Made-up",
    front=RouteSet((Route("POST", "/made-up/echo", echo, render, "Echo a text"),), render, STATUSES, ("/made-up/",)),
    settings=MadeUpSettings,
    configure=configure,
)
