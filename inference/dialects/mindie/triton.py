"""MindIE's Triton dialect: .../infer on tokens, .../generate and .../generate_stream on texts, .../stopInfer."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.mindie.answer import body_of, counted
from inference.dialects.mindie.errors import MindieError, invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.finish import finish_reason
from inference.dialects.mindie.parameters import Sampling, TextErrors, text_of
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.dialects.mindie.tgi import DEFAULT_MAX_NEW_TOKENS
from inference.errors import Unavailable
from inference.generation.answer import Reply, WholeReply
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.answer import Incoming
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.target import Target

MAX_TOKENS = 1 << 20
ID = re.compile(r"[a-zA-Z0-9_-]{1,256}")
BAD_ID = "The format of id is invalid, it should match ^[a-zA-Z0-9_-]{1,256}$."
BAD_REQUEST_ID = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."
)
BAD_SHAPE = f"Shape must be at most two-dimensional, and the last element's value must be in (0,{MAX_TOKENS}]."
NO_TEXT = "The text_input not found"
WRONG_LENGTH = (
    "text_input must be necessary and data type must be string and length in (0, {limit}], but the length of inputs is "
    "{length}"
)


async def infer(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST .../infer: token ids in and out, as tensors."""
    with counted(exchange, services, state) as incoming:
        target, body = await _begin(incoming)
        ids, nested = await exchange.work(_tensor, body)
        request_id = _request_id(body)
        output = _output_name(body)
        merged = {**Fields(body).object("parameters").values, **nested}
        internal_id = state.new_id(exchange)
        form = Form(kind=MessageType.TRITON_TOKEN, request_id=request_id or internal_id, output=output)
        request = await exchange.work(_parse, Fields(merged), target, TokenPrompt(ids), form, request_id)
        await incoming.answer(request, internal_id)


async def generate(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST .../generate: text in, text out."""
    await _text(exchange, services, state, stream=False)


async def generate_stream(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST .../generate_stream: text in, frames out."""
    await _text(exchange, services, state, stream=True)


async def stop(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST .../stopInfer: stop a running request, which is answered with its output so far; this response repeats the
    body.
    """
    with suppress(Unavailable):  # it has never been ready: no request runs there
        state.named(exchange.parameters["model"])
    body = await body_of(exchange, state, "Failed to parse context to json body.")
    given = body.get("id")
    if given is None:
        raise invalid("Not found id.")
    if not isinstance(given, str) or not ID.fullmatch(given):
        raise invalid(BAD_ID)
    if not state.running.stop(exchange.tenant, given):
        raise MindieError(404, f"RequestId is {given} not found.")
    await exchange.respond(json_response(body))


async def _text(exchange: Exchange, services: Services, state: MindieState, stream: bool) -> None:
    with counted(exchange, services, state) as incoming:
        target, body = await _begin(incoming)
        request_id = _request_id(body)
        given = body.get("text_input")
        internal_id = state.new_id(exchange)
        strange = f"The type of text_input is abnormal. The requestId is {internal_id}"
        wrong = TextErrors(NO_TEXT, "Parameter text_input arr is empty", strange, WRONG_LENGTH)
        prompt = await exchange.work(text_of, given, state.settings, wrong)
        shown_id = request_id or internal_id
        form = Form(kind=MessageType.TRITON, stream=stream, request_id=shown_id, model=target.entry.name)
        parameters = Fields(body).object("parameters")
        request = await exchange.work(_parse, parameters, target, TextPrompt(prompt), form, request_id)
        await incoming.answer(request, internal_id)


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    if form.kind is MessageType.TRITON_TOKEN:
        return TokenReply(form.request_id, form.output)
    return TextReply(
        clock, form.request_id, form.model, form.details, form.statistics, settings.full_text_enabled
    )  # fmt: skip


async def _begin(incoming: Incoming) -> tuple[Target, dict[str, Any]]:
    """Check the model, then the body, then whether the service still accepts requests."""
    target = incoming.state.named(incoming.exchange.parameters["model"])
    body = await incoming.body()
    incoming.state.check_accepting(incoming.services)
    return target, body


def _request_id(body: dict[str, Any]) -> str | None:
    given = Fields(body).string("id")
    if given is not None and not ID.fullmatch(given):
        raise invalid(BAD_REQUEST_ID)
    return given


def _tensor(body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The token ids of the one input, and its parameters."""
    inputs = body.get("inputs")
    if not isinstance(inputs, list):
        raise invalid("Req should contain 'inputs' and the type should be array.")
    if len(inputs) != 1:
        raise invalid("Inputs count must be 1.")
    tensor = Fields(inputs[0] if isinstance(inputs[0], dict) else {})
    name = _required(tensor, "name", str, "string")
    if len(name.encode("utf-8", "surrogatepass")) > 256:
        raise invalid("The length of name set in inputs exceeds 256.")
    shape = _required(tensor, "shape", list, "array")
    if not all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in shape):
        raise invalid("Shape element must be integer type.")
    if not 1 <= len(shape) <= 2 or (len(shape) == 2 and shape[0] != 1) or not 1 <= shape[-1] <= MAX_TOKENS:
        raise invalid(BAD_SHAPE)
    datatype = _required(tensor, "datatype", str, "string")
    if datatype != "UINT32":
        raise invalid(f"Unsupported datatype, got {datatype[:40]}.")
    data = _required(tensor, "data", list, "array")
    if len(data) > MAX_TOKENS:
        raise invalid(f"Data element must be no more than max token id length, which is {MAX_TOKENS}.")
    if len(data) != shape[-1]:
        raise invalid(f"Data size should be {shape[-1]}, got {len(data)}.")
    if not set(map(type, data)) <= {int}:
        raise invalid("Data element must be integer type.")
    return data, tensor.object("parameters").values


def _required(tensor: Fields, key: str, kind: type, text: str) -> Any:
    value = tensor.get(key)
    if not isinstance(value, kind):
        raise invalid(f"Cannot find {key} in inputs or its type is not {text}")
    return value


def _output_name(body: dict[str, Any]) -> str:
    outputs = body.get("outputs")
    if not isinstance(outputs, list):
        raise invalid("Req should contain 'outputs' and the type should be array.")
    if len(outputs) != 1:
        raise invalid(f"Outputs size should be 1, got {len(outputs)}.")
    name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    if not isinstance(name, str):
        raise invalid("Outputs name must be non-empty string.")
    return name or "output0"


def _parse(given: Fields, target: Target, prompt: Prompt, form: Form, request_id: str | None) -> InferenceRequest:
    """Parse the parameters in MindIE's order, which decides which error is reported; `form` lacks `details` and `statistics`.
    Only a request with a text has `typical_p` and `perf_stat`, and then `timeout` is read last.
    """
    text = form.kind is MessageType.TRITON
    sampling = Sampling(temperature=given.positive_temperature())
    sampling.top_k = given.top_k(0)
    sampling.top_p = given.top_p(open_high=False)
    if text:
        given.typical_p()
    sampling.do_sample = given.boolean("do_sample")
    sampling.seed = given.seed()
    sampling.repetition_penalty = given.repetition_penalty()
    given.boolean("watermark")
    priority = given.priority()
    max_new_tokens = given.positive("max_new_tokens")
    timeout_s, statistics = None, False
    if not text:
        timeout_s = given.timeout_s()
    details = bool(given.boolean("details"))
    given.positive("batch_size")
    if text:
        timeout_s, statistics = given.timeout_s(), bool(given.boolean("perf_stat"))
    return InferenceRequest(
        target=target,
        prompt=prompt,
        sampling=sampling,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        form=replace(form, details=details, statistics=statistics),
        make_reply=make_reply,
        names=set() if request_id is None else {request_id},
        timeout_s=timeout_s,
        priority=priority,
    )


class TokenReply(WholeReply):
    """The generated ids, including the end token, as one tensor."""

    def __init__(self, request_id: str, output: str) -> None:
        self._request_id, self._output = request_id, output
        self._ids: list[int] = []

    def add(self, delta: Delta) -> None:
        self._ids += delta.token_ids

    def whole(self) -> Response:
        """The one output tensor."""
        tensor = {"name": self._output, "shape": [1, len(self._ids)], "datatype": "UINT32", "data": self._ids}
        return json_response({"id": self._request_id, "outputs": [tensor]})


class TextReply(Reply):
    """One sequence as text, without the prompt."""

    def __init__(
        self, clock: Clock, request_id: str, model: str, details: bool, statistics: bool, cumulative: bool
    ) -> None:
        self._clock, self._details, self._statistics, self._cumulative = clock, details, statistics, cumulative
        self._head = {"id": request_id, "model_name": model, "model_version": None}
        self._texts: list[str] = []
        self._count = 0
        self._costs: list[list[int]] = []
        """The id of each token, and its milliseconds: those of its step, of which the first token has all."""
        self._finish: str | None = None

    def chunks(self, delta: Delta) -> list[bytes]:
        """One frame, without a space after `data:`."""
        self.add(delta)
        text = "".join(self._texts) if self._cumulative else delta.text
        frame: dict[str, Any] = {**self._head, "text_output": text}
        if self._details:
            clock = self._clock
            frame["details"] = self._render_details(clock.batch_size, clock.wait_us)
            frame["prefill_time"], frame["decode_time"] = clock.prefill_ms, clock.decode_ms
        return [b"data:" + msgspec.json.encode(frame) + b"\n\n"]

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._count += len(delta.token_ids)
        if self._statistics:
            spent_ms = self._clock.step_ms
            self._costs += [[token, spent_ms if i == 0 else 0] for i, token in enumerate(delta.token_ids)]
        if delta.finish_reason is not None:
            self._finish = finish_reason(delta)

    def whole(self) -> Response:
        """The text, and details with one entry for each step."""
        value: dict[str, Any] = {**self._head, "text_output": "".join(self._texts)}
        if self._details:
            value["details"] = self._render_details(self._clock.batch_sizes, self._clock.waits_us)
        return json_response(value)

    def _render_details(self, batch_size: Any, wait_us: Any) -> dict[str, Any]:
        finish = {} if self._finish is None else {"finish_reason": self._finish}
        return {
            **finish,
            "generated_tokens": self._count,
            "first_token_cost": None,
            "decode_cost": None,
            **({"perf_stat": self._costs} if self._statistics else {}),
            "batch_size": batch_size,
            "queue_wait_time": wait_us,
        }
