"""TGI, Triton, MindIE and DJL Serving over HTTP."""

from __future__ import annotations

import json
from typing import Any

from config.conformance.session import PROMPT, TOKENS, Session, has, require, same

TGI_ASK = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "do_sample": False}}
TRITON_ASK = {"text_input": PROMPT, "parameters": {"max_tokens": TOKENS, "temperature": 0}}


def tgi_info(session: Session) -> None:
    """The router's description, and its health."""
    has(session.get(f"{session.addresses.front}/info"), "model_id", "max_concurrent_requests", "version")
    same(session.call("GET", f"{session.addresses.front}/health").status_code, 200, "the status of /health")


def tgi_generate(session: Session) -> None:
    """A generation with its details, token by token."""
    body = {**TGI_ASK, "parameters": {**TGI_ASK["parameters"], "details": True}}  # type: ignore[dict-item]
    answer = session.post(f"{session.addresses.front}/generate", body)
    same(answer["generated_text"], session.expected, "generated_text")
    details = answer["details"]
    has(details, "finish_reason", "generated_tokens", "tokens", "prefill")
    same(len(details["tokens"]), details["generated_tokens"], "the number of tokens")
    has(details["tokens"][0], "id", "text", "logprob", "special")


def tgi_stream(session: Session) -> None:
    """A stream: one token an event, the whole text in the last."""
    events = [json.loads(data) for data in session.events(f"{session.addresses.front}/generate_stream", TGI_ASK)]
    require(all(event["generated_text"] is None for event in events[:-1]), "generated_text before the last event")
    same(events[-1]["generated_text"], session.expected, "generated_text")
    text = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    same(text.strip(), session.expected.strip(), "the joined tokens")


def tgi_refusals(session: Session) -> None:
    """A bad parameter is 422 with its error type."""
    body = {"inputs": PROMPT, "parameters": {"temperature": -1}}
    answer = session.post(f"{session.addresses.front}/generate", body, 422)
    same(answer.get("error_type"), "validation", "error_type")


def triton_metadata(session: Session) -> None:
    """Health, and the metadata of server and model."""
    url = f"{session.addresses.front}/v2"
    has(session.get(url), "name", "version", "extensions")
    for path in ("health/live", "health/ready", f"models/{session.model}/ready"):
        same(session.call("GET", f"{url}/{path}").status_code, 200, f"the status of {path}")
    has(session.get(f"{url}/models/{session.model}"), "name", "versions", "platform", "inputs", "outputs")


def triton_generate(session: Session) -> None:
    """The generate extension, whole and streamed."""
    url = f"{session.addresses.front}/v2/models/{session.model}/generate"
    answer = session.post(url, TRITON_ASK)
    same((answer["model_name"], answer["text_output"]), (session.model, session.expected), "the answer")
    frames = [json.loads(data) for data in session.events(f"{url}_stream", {**TRITON_ASK, "stream": True})]
    same("".join(frame["text_output"] for frame in frames), session.expected, "the streamed text")


def triton_infer(session: Session) -> None:
    """Inference with tensors of texts."""
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    body = {"id": "one", "inputs": [tensor], "parameters": TRITON_ASK["parameters"]}
    answer = session.post(f"{session.addresses.front}/v2/models/{session.model}/infer", body)
    same(answer.get("id"), "one", "id")
    [output] = answer["outputs"]
    same((output["datatype"], output["data"]), ("BYTES", [session.expected]), "the output")


def triton_refusals(session: Session) -> None:
    """An unknown model, and an input that is missing, are refused with an error."""
    url = f"{session.addresses.front}/v2/models"
    for path, body in (("there-is-no-such-model/generate", TRITON_ASK), (f"{session.model}/generate", {})):
        answer = session.call("POST", f"{url}/{path}", body)
        require(400 <= answer.status_code < 500, f"status {answer.status_code}")
        has(answer.json(), "error")


def mindie_models(session: Session) -> None:
    """The list of models on its own plane."""
    listed = session.get(f"{session.addresses.mindie}/v1/models")
    same(listed.get("object"), "list", "object")
    require(session.model in [row["id"] for row in listed["data"]], f"{session.model} is not in the list")


def mindie_native(session: Session) -> None:
    """The native route, whole and streamed."""
    parameters: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
    url = f"{session.addresses.mindie}/infer"
    answer = session.post(url, {"inputs": PROMPT, "parameters": parameters})
    same(answer["generated_text"], session.expected, "generated_text")
    streamed = {"inputs": PROMPT, "stream": True, "parameters": {**parameters, "details": True}}
    frames = [json.loads(data) for data in session.events(url, streamed)]
    has(frames[0], "prefill_time", "decode_time", "token")
    same(frames[-1]["generated_text"], session.expected, "the streamed generated_text")


def mindie_others(session: Session) -> None:
    """The same prompt as TGI, as vLLM and as OpenAI have it."""
    url = session.addresses.mindie
    tgi = session.post(f"{url}/generate", TGI_ASK)
    same(tgi["generated_text"], session.expected, "generated_text of TGI's body")
    vllm = session.post(f"{url}/generate", {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0})
    same(vllm["text"], [f"{PROMPT} {session.expected}"], "text of vLLM's body")
    body = {"model": session.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    openai = session.post(f"{url}/v1/completions", body)
    same(openai["choices"][0]["text"], session.expected, "text of OpenAI's body")


def mindie_refusals(session: Session) -> None:
    """A body without a prompt is refused with MindIE's envelope."""
    answer = session.call("POST", f"{session.addresses.mindie}/infer", {})
    require(400 <= answer.status_code < 500, f"status {answer.status_code}")
    has(answer.json(), "error", "error_type")


def djl_ping(session: Session) -> None:
    """The health."""
    same(session.call("GET", f"{session.addresses.djl}/ping").status_code, 200, "the status of /ping")


def djl_invocations(session: Session) -> None:
    """An invocation, and a prediction by the model's name."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "do_sample": False}}
    for path in ("invocations", f"predictions/{session.model}"):
        answer = session.post(f"{session.addresses.djl}/{path}", body)
        same(answer["generated_text"], session.expected, f"generated_text of /{path}")


def djl_models(session: Session) -> None:
    """The list of models, if the key may manage."""
    listed = session.get(f"{session.addresses.djl}/models")
    require(session.model in [row["modelName"] for row in listed["models"]], f"{session.model} is not in the list")


TGI = (tgi_info, tgi_generate, tgi_stream, tgi_refusals)
TRITON = (triton_metadata, triton_generate, triton_infer, triton_refusals)
MINDIE = (mindie_models, mindie_native, mindie_others, mindie_refusals)
DJL = (djl_ping, djl_invocations, djl_models)
