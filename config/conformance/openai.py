"""OpenAI's API as vLLM serves it, and vLLM's own routes."""

from __future__ import annotations

import json
from typing import Any

from config.conformance.session import PROMPT, TOKENS, Session, has, require, same

ASK = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def _complete(session: Session, **fields: Any) -> Any:
    return session.post(f"{session.addresses.front}/v1/completions", {"model": session.model, **ASK, **fields})


def _chat(session: Session, **fields: Any) -> dict[str, Any]:
    return {"model": session.model, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, **fields}


def models(session: Session) -> None:
    """The list of models, and one of it."""
    listed = session.get(f"{session.addresses.front}/v1/models")
    same(listed.get("object"), "list", "object")
    require(session.model in [row["id"] for row in listed["data"]], f"{session.model} is not in the list")
    one = session.get(f"{session.addresses.front}/v1/models/{session.model}")
    same((one.get("id"), one.get("object")), (session.model, "model"), "the model")


def completion(session: Session) -> None:
    """A completion: its fields, and the sums of its usage."""
    answer = _complete(session)
    has(answer, "id", "created", "model", "choices", "usage")
    same(answer["object"], "text_completion", "object")
    usage, choice = answer["usage"], answer["choices"][0]
    same(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")
    require(0 < usage["completion_tokens"] <= TOKENS, f"completion_tokens is {usage['completion_tokens']}")
    at_limit = usage["completion_tokens"] == TOKENS
    require(choice["finish_reason"] in (("length", "stop") if at_limit else ("stop",)), "finish_reason")


def completion_stream(session: Session) -> None:
    """A streamed completion has the same text, its usage if asked for, and ends with [DONE]."""
    url = f"{session.addresses.front}/v1/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *frames, last = session.events(url, {"model": session.model, **ASK, **options})
    same(last, "[DONE]", "the last event")
    chunks = [json.loads(frame) for frame in frames]
    same("".join(c["choices"][0]["text"] for c in chunks if c["choices"]), session.expected, "the text")
    require(not chunks[-1]["choices"] and chunks[-1]["usage"]["completion_tokens"] > 0, "there is no usage at the end")


def chat(session: Session) -> None:
    """A chat completion, and its stream with the same content."""
    url = f"{session.addresses.front}/v1/chat/completions"
    answer = session.post(url, _chat(session))
    same(answer["object"], "chat.completion", "object")
    message = answer["choices"][0]["message"]
    same(message["role"], "assistant", "role")
    *frames, last = session.events(url, _chat(session, stream=True))
    same(last, "[DONE]", "the last event")
    chunks = [json.loads(frame) for frame in frames]
    same({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"}, "object")
    same(len({chunk["id"] for chunk in chunks}), 1, "the number of ids")
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    same(deltas[0].get("role"), "assistant", "the first delta's role")
    same("".join(delta.get("content") or "" for delta in deltas), message["content"] or "", "the content")
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    same(reasons, [answer["choices"][0]["finish_reason"]], "finish_reason")


def choices(session: Session) -> None:
    """`n` choices with their indices, and a seed that repeats them."""
    fields = {"n": 3, "temperature": 1.0, "seed": 7}
    answer = _complete(session, **fields)
    same([choice["index"] for choice in answer["choices"]], [0, 1, 2], "the indices")
    texts = [choice["text"] for choice in answer["choices"]]
    same([choice["text"] for choice in _complete(session, **fields)["choices"]], texts, "the seeded texts")


def stop(session: Session) -> None:
    """A stop string ends the text before it."""
    words = session.expected.split()
    require(words, "the model generates no words: name another")
    choice = _complete(session, stop=[words[-1]])["choices"][0]
    require(words[-1] not in choice["text"], f"the text has the stop string: {choice['text']!r}")
    same(choice["finish_reason"], "stop", "finish_reason")


def logprobs(session: Session) -> None:
    """Log-probabilities: one for each token, none above 0, and the tokens are the text."""
    answer = _complete(session, logprobs=2)
    found = answer["choices"][0]["logprobs"]
    same(len(found["tokens"]), answer["usage"]["completion_tokens"], "the number of tokens")
    require(all(value <= 0 for value in found["token_logprobs"]), "a log-probability is above 0")
    same("".join(found["tokens"]), answer["choices"][0]["text"], "the joined tokens")


def refusals(session: Session) -> None:
    """An unknown model is 404, a bad value and bad JSON 400, each with an error object."""
    url = f"{session.addresses.front}/v1/completions"
    for body, status in (
        ({"model": "there-is-no-such-model", **ASK}, 404),
        ({"model": session.model, **ASK, "temperature": -1}, 400),
        (b"{", 400),
    ):
        error = session.post(url, body, status).get("error")
        has(error, "message", "type", "code")


def version(session: Session) -> None:
    """The version and the health."""
    has(session.get(f"{session.addresses.front}/version"), "version")
    same(session.call("GET", f"{session.addresses.front}/health").status_code, 200, "the status of /health")


def tokens(session: Session) -> None:
    """A text is the text of its tokens, and a prompt of token ids is the prompt."""
    url = session.addresses.front
    found = session.post(f"{url}/tokenize", {"model": session.model, "prompt": PROMPT, "add_special_tokens": False})
    same(found["count"], len(found["tokens"]), "count")
    back = session.post(f"{url}/detokenize", {"model": session.model, "tokens": found["tokens"]})
    same(back["prompt"], PROMPT, "the text of the tokens")
    whole = session.post(f"{url}/tokenize", {"model": session.model, "prompt": PROMPT})["tokens"]
    same(_complete(session, prompt=whole)["choices"][0]["text"], session.expected, "the text")


def metrics(session: Session) -> None:
    """The metrics that vLLM's dashboards read have this model's series."""
    page = session.text(f"{session.addresses.front}/metrics")
    for name in (
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
    ):
        require(any(line.startswith(f"{name}{{") for line in page.splitlines()), f"{name} has no series")


OPENAI = (models, completion, completion_stream, chat, choices, stop, logprobs, refusals)
VLLM = (version, tokens, metrics)
