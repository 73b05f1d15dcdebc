"""A request that leaves a prefill instance, as MindIE's `DecodeParameters`. It sends nothing."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb

if TYPE_CHECKING:
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.requests import InferenceRequest
    from inference.generation.generation import Generation

FLOATS = {
    "temperature": "temperature",
    "top_p": "topP",
    "repetition_penalty": "repetitionPenalty",
    "frequency_penalty": "frequencyPenalty",
    "presence_penalty": "presencyPenalty",
}
"""The numbers of `Sampling` that travel in single precision, and their names there."""


def travelling(request: InferenceRequest) -> InferenceRequest:
    """The request with its numbers as the other instance reads them, so that both sample with the same."""
    rounded: dict[str, Any] = {name: shortest(getattr(request.sampling, name)) for name in FLOATS}
    return replace(request, sampling=replace(request.sampling, **rounded))


def pack(
    request: InferenceRequest, request_id: str, generation: Generation, first: list[int], clock: Clock, began_us: int
) -> pb.DecodeParameters:
    """The message. `first` are the tokens of this instance; `began_us` is when the request came, in microseconds."""
    form, prompt = request.form, generation.prompt_token_ids
    made = pb.DecodeParameters(
        reqId=request_id,
        tokens=[*prompt, *request.generated],
        firstToken=first,
        msgType=form.kind,
        isStream=form.stream,
        maxNewToken=request.max_tokens or 0,
        details=form.details,
        returnFullText=form.full_text,
        decoderInputDetails=form.prefill,
        id=form.request_id,
        modelName=form.model or request.target.entry.name,
        loraId="" if request.target.adapter is None else request.target.adapter.name,
        outputNames=[form.output] if form.output else [],
        tools="" if form.tools is None else json.dumps(form.tools),
        toolChoice="" if form.choice is None else json.dumps(form.choice),
        useToolCall=form.tools is not None,
        e2eStartTime=began_us,
        prefillTokenNum=len(prompt),
        preOutputTokenNum=len(request.generated),
    )
    made.textInput.value = form.text
    made.inferParams.priority = request.priority or 0
    made.inferParams.timeout = request.timeout_s or 0
    made.metrics.firstTokenCost = clock.first_ms
    made.metrics.decodeTime.extend(clock.decodes)
    made.metrics.batchSize.extend(clock.batch_sizes)
    made.metrics.queueWaitTime.extend(clock.waits_us)
    made.metrics.prefixCachedTokenNums.append(generation.usage.cached_tokens)
    _pack_sampling(made.samplingParams, request, generation.params.seed)
    vocab_size = request.target.info.vocab_size
    made.samplingParams.stopTokenIds.value.extend(
        token
        for token in request.sampling.stop_token_ids
        if 0 <= token < vocab_size  # others never come
    )
    return made


def _pack_sampling(made: Any, request: InferenceRequest, seed: int) -> None:
    sampling = request.sampling
    for name, there in FLOATS.items():
        value = getattr(sampling, name)
        if value is not None:
            getattr(made, there).value = value
    if sampling.top_k is not None and sampling.top_k > 0:
        made.topK.value = sampling.top_k
    made.doSample.value = sampling.sampled(1)
    made.seed.value = seed
    if sampling.stop:
        made.stopStrings.value = base64.b64encode(json.dumps(sampling.stop).encode()).decode()
        made.stopStrings.list.extend(sampling.stop)
    made.skipSpecialTokens.value = sampling.skip_special_tokens
    made.includeStopStrInOutput.value = sampling.include_stop
    made.ignoreEos.value = sampling.ignore_eos
    if request.form.response_format is not None:
        made.responseFormat = json.dumps(request.form.response_format)


def shortest(value: float | None) -> float | None:
    """The number with the fewest digits that is the same in single precision: what the client most likely wrote."""
    if value is None:
        return None
    single = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == single), value)
