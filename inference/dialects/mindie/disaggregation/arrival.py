"""A request that comes to a decode instance, read from MindIE's `DecodeParameters`. It runs nothing."""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.kv_transfer.handle import parse_source
from inference.chat.call_grammar import with_calls
from inference.chat.tools import tool_grammar
from inference.dialects.mindie.chat_messages import tools_of
from inference.dialects.mindie.disaggregation.departure import FLOATS, shortest
from inference.dialects.mindie.errors import ENQUEUE, MindieError, invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.openai_parameters import response_format
from inference.dialects.mindie.parameters import Sampling
from inference.dialects.mindie.replies import REPLIES
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.generation.requests import TokenPrompt
from inference.http.sse import DONE

if TYPE_CHECKING:
    from engine.kv_transfer.handle import KvSource
    from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb
    from inference.dialects.mindie.state import MindieState
    from inference.workers.target import Target

CHATS = (MessageType.OPENAI, MessageType.VLLM_OPENAI)
INVALID = "the decode parameters are invalid: "
MAX_ID = 1024


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that another instance has begun. `spent_s`: how long it has run there; `first_ms` and the lists are the times
    of its steps so far.
    """

    request_id: str
    request: InferenceRequest
    prefill_address: str
    source: KvSource | None
    """Where the prompt's KV blocks are, as the other instance says."""
    spent_s: float
    cached_tokens: int
    first_ms: int
    decodes: list[int]
    batch_sizes: list[int]
    waits_us: list[int]

    @property
    def results_id(self) -> str:
        """The id of its results: that of Triton's texts is the one in the answer."""
        form = self.request.form
        return form.request_id if form.kind is MessageType.TRITON else self.request_id


def unpack(given: pb.DecodeParameters, state: MindieState) -> Arrived:
    """The request in a message; raises a ServingError where a field cannot be used."""
    if not 0 < len(given.reqId) <= MAX_ID or not given.reqId.isprintable():
        raise invalid(INVALID + "reqId")
    kinds = {kind.value: kind for kind in MessageType}
    if given.msgType not in kinds:
        raise invalid(INVALID + "msgType")
    length = given.prefillTokenNum or len(given.tokens)
    if not given.firstToken or not 0 < length <= len(given.tokens):
        raise invalid(INVALID + "tokens")
    target = _target(given, state)
    form = _form(given, kinds[given.msgType])
    generated = [*given.tokens[length:], *given.firstToken]
    if not all(0 <= token < target.info.vocab_size for token in generated):
        raise MindieError(424, ENQUEUE + "Invalid Input Ids")
    if given.maxNewToken and len(generated) >= given.maxNewToken:
        raise invalid(INVALID + "maxNewToken")
    form_grammar = response_format(Fields({"response_format": form.response_format}))
    grammar = tool_grammar(form.tools, form.choice) or form_grammar
    request = InferenceRequest(
        target=target,
        prompt=TokenPrompt(list(given.tokens[:length]), chat=form.kind in CHATS),
        sampling=_sampling(given.samplingParams),
        max_tokens=given.maxNewToken if given.maxNewToken > 0 else None,
        form=form,
        make_reply=REPLIES[form.kind],
        grammar=with_calls(grammar, form.tools, form.choice, True, target.tokenizer),
        names={given.id} if given.id else set(),
        timeout_s=given.inferParams.timeout or None,
        priority=given.inferParams.priority or None,
        end=DONE if form.kind in (*CHATS, MessageType.VLLM_OPENAI_COMP) else b"",
        generated=generated,
    )
    metrics = given.metrics
    return Arrived(
        given.reqId,
        request,
        given.pNodeAddr,
        _source(given.kvSource),
        max(0.0, time.time() - given.e2eStartTime / 1e6) if given.e2eStartTime else 0.0,
        sum(metrics.prefixCachedTokenNums),
        metrics.firstTokenCost,
        list(metrics.decodeTime),
        list(metrics.batchSize),
        list(metrics.queueWaitTime),
    )


def _source(text: str) -> KvSource | None:
    if not text:
        return None
    try:
        return parse_source(text)
    except ValueError as error:
        raise invalid(INVALID + "kvSource") from error


def _target(given: pb.DecodeParameters, state: MindieState) -> Target:
    target = state.router.resolve(given.modelName or None)
    if not given.loraId or target.adapter is not None:
        return target
    adapter = target.entry.adapter(given.loraId)
    if adapter is None:
        raise invalid(INVALID + "loraId")
    return replace(target, adapter=adapter)


def _form(given: pb.DecodeParameters, kind: MessageType) -> Form:
    tools, choice = tools_of(
        Fields({"tools": _json(given.tools, "tools"), "tool_choice": _json(given.toolChoice, "toolChoice")})
    )
    wanted = _json(given.samplingParams.responseFormat, "responseFormat")
    if wanted is not None and not isinstance(wanted, dict):
        raise invalid(INVALID + "responseFormat")
    return Form(
        kind=kind,
        stream=given.isStream,
        request_id=given.id,
        model=given.modelName,
        text=given.textInput.value,
        details=given.details,
        full_text=given.returnFullText,
        prefill=given.decoderInputDetails,
        output=given.outputNames[0] if given.outputNames else "",
        tools=tools,
        choice=choice,
        response_format=wanted,
    )


def _sampling(given: Any) -> Sampling:
    numbers = {name: _value(given, there) for name, there in FLOATS.items()}
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise invalid(INVALID + name)
    fields = Fields({name: shortest(value) for name, value in numbers.items()})
    return Sampling(
        temperature=fields.temperature(),
        top_p=fields.top_p(open_high=False),
        repetition_penalty=fields.repetition_penalty(),
        frequency_penalty=fields.frequency_penalty(),
        presence_penalty=fields.presence_penalty(),
        top_k=_value(given, "topK"),
        do_sample=_value(given, "doSample"),
        seed=_value(given, "seed"),
        stop=_stop(given.stopStrings),
        stop_token_ids=list(given.stopTokenIds.value),
        include_stop=given.includeStopStrInOutput.value,
        skip_special_tokens=_value(given, "skipSpecialTokens") is not False,
        ignore_eos=given.ignoreEos.value,
    )


def _stop(given: Any) -> list[str]:
    if given.list or not given.value:
        return list(given.list)
    try:
        listed = json.loads(base64.b64decode(given.value, validate=True))
    except (binascii.Error, ValueError) as error:
        raise invalid(INVALID + "stopStrings") from error
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise invalid(INVALID + "stopStrings")
    return listed


def _value(given: Any, name: str) -> Any:
    """An optional value; None if it is absent."""
    wrapper = getattr(given, name)
    return wrapper.value if wrapper.HasField("value") else None


def _json(text: str, name: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(INVALID + name) from error
