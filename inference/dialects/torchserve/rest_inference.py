"""The REST twin of the inference service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.torchserve.errors import missing_name, named, naming, render
from inference.dialects.torchserve.inputs import parse_input
from inference.dialects.torchserve.open_inference import answer_of, without_binary
from inference.dialects.torchserve.predictions import OPENAI, Prediction, predict, read_input, unknown
from inference.dialects.torchserve.rest_inputs import query_of, values_of
from inference.dialects.torchserve.versions import find_served
from inference.errors import InvalidRequest, MethodNotAllowed, NotServed, RouteNotFound, ServingError, Starting
from inference.http.exchange import Response, json_response
from inference.http.refusals import log_refusal
from inference.vendors import openai_errors
from inference.vendors.model_server import pretty
from inference.workers.scope import scoped

if TYPE_CHECKING:
    from inference.dialects.torchserve.inputs import Input
    from inference.dialects.torchserve.state import State
    from inference.http.exchange import Exchange
    from inference.services import Services

JSON, TEXT = b"application/json", b"text/plain; charset=utf-8"
STREAMED: list[tuple[bytes, bytes]] = [(b"content-type", TEXT)]


async def ping(exchange: Exchange, services: Services, state: State) -> None:
    """/ping: 500 if it is not healthy."""
    await exchange.respond(pretty(state.health, 200 if state.healthy else 500))


async def predictions(exchange: Exchange, services: Services, state: State) -> None:
    """/predictions/{model}[/{version}]: text or JSON, streamed in chunks if `stream` is true."""
    path = exchange.parameters
    await _answer(exchange, state, path["model"], path.get("version", ""), await values_of(exchange))


async def predict_below(exchange: Exchange, services: Services, state: State) -> None:
    """/predictions/{model}/{version}/{path}: OpenAI's routes, for OpenAI's clients."""
    await _openai(exchange, state)


async def invocations(exchange: Exchange, services: Services, state: State) -> None:
    """/invocations?model_name=, /models/{model}/invoke: as predictions; without a name, of the only model or the default."""
    values = await values_of(exchange)
    model = exchange.parameters.get("model") or values.pop("model_name", b"").decode("utf-8", "replace")
    if not model:
        resolved = scoped(services.holder.current).resolve(None)
        if resolved is None:
            raise missing_name()
        model = resolved.deployment.served_name or resolved.deployment.name
    await _answer(exchange, state, model, "", values)


async def kserve_predict(exchange: Exchange, services: Services, state: State) -> None:
    """/v1/models/{model}:predict: KServe's `instances` for `predictions`."""
    model = exchange.parameters["model"]
    with naming(model, ""), services.admission.permit(exchange.permit_holder):
        instances = (await exchange.json()).get("instances")
        if not isinstance(instances, list) or not 0 < len(instances) <= services.limits.max_prompts:
            raise InvalidRequest(f"instances must be a list of 1 to {services.limits.max_prompts} inputs", "instances")
        inputs = await exchange.work(_inputs, instances)
        ready = [await predict(state, given, model, "", exchange) for given in inputs]
        answers = await exchange.unless_gone(_all(ready))
        values = [_value(answer, given.text is None) for answer, given in zip(answers, inputs, strict=True)]
        await exchange.respond(json_response({"predictions": values}))


async def kserve_infer(exchange: Exchange, services: Services, state: State) -> None:
    """/v2/models/{model}/infer: KServe's tensors, as on the front plane, always as JSON."""
    model = exchange.parameters["model"]
    with naming(model, ""), services.admission.permit(exchange.permit_holder):
        served = await find_served(services, model, "")
        body = await exchange.work(without_binary, await exchange.json())
        answer = await exchange.unless_gone(answer_of(services, exchange, served, model, body))
        await exchange.respond(json_response(answer))


async def explanations(exchange: Exchange, services: Services, state: State) -> None:
    """/explanations/{model}: a language model's answers are not explained."""
    raise NotServed("explanations are not supported by this server")


async def workflows(exchange: Exchange, services: Services, state: State) -> None:
    """/workflows and /wfpredict/{workflow}: graphs of models, with code of their own."""
    raise NotServed("workflows are not supported by this server")


async def _answer(exchange: Exchange, state: State, model: str, version: str, values: dict[str, bytes]) -> None:
    services = state.services
    with naming(model, version), services.admission.permit(exchange.permit_holder):
        given = await read_input(values)
        prediction = await predict(state, given, model, version, exchange)
        if given.fields.get("stream") is True:
            await exchange.stream(
                prediction.pieces(),
                headers=[(b"content-type", JSON)] if given.text is None else STREAMED,
                render_error=lambda error: render(named(error, model, version)).body,
                keep_alive=None,
            )
            return
        body = await exchange.unless_gone(_whole(prediction))
        await exchange.respond(Response(200, body, JSON if given.text is None else TEXT))


async def _openai(exchange: Exchange, state: State) -> None:
    path = exchange.parameters["path"].strip("/")
    served = await find_served(state.services, exchange.parameters["model"], exchange.parameters["version"])
    if not path.startswith(OPENAI):
        raise unknown(path)
    try:
        body = {} if exchange.method == "GET" else await exchange.json()
        await state.services.delegation.run(exchange, f"/{path}", body, served.entry.public_id)
    except (RouteNotFound, MethodNotAllowed) as error:
        raise unknown(path) from error
    except Starting:  # the plane waits for the first worker
        raise
    except ServingError as error:
        if exchange.status:
            raise
        response = openai_errors.render(error)  # the client is OpenAI's
        log_refusal(error, exchange.method, exchange.path, response.status, exchange.request_id)
        await exchange.respond(response)


async def _all(predictions: list[Prediction]) -> list[bytes]:
    """The answers of predictions that run at once; the first error ends all."""
    running = [asyncio.ensure_future(_whole(each)) for each in predictions]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _whole(prediction: Prediction) -> bytes:
    return await prediction.whole()


def _inputs(instances: list[Any]) -> list[Input]:
    return [parse_input({"data": _data(instance)}) for instance in instances]


def _data(instance: Any) -> bytes:
    """An instance as the handler gets it: its `data` or `body`, or itself."""
    if isinstance(instance, dict):
        instance = instance.get("data", instance.get("body", instance))
    return instance.encode() if isinstance(instance, str) else msgspec.json.encode(instance)


def _value(answer: bytes, as_json: bool) -> Any:
    return msgspec.json.decode(answer) if as_json else answer.decode()


async def model_ready(exchange: Exchange, services: Services, state: State) -> None:
    """GET /v1/models/{model}: KServe's readiness."""
    served = await find_served(services, exchange.parameters["model"], query_of(exchange).get("version", ""))
    ready = any(t.entry.name == served.entry.name and t.responsive for t in services.router.targets)
    await exchange.respond(json_response({"name": exchange.parameters["model"], "ready": ready}))
