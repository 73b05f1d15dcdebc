"""The input of a prediction: named values, of which `data` or `body` is text, JSON, or an OpenAI body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from inference.errors import InvalidRequest, MalformedBody, NotServed
from inference.http.exchange import parse_json, parse_value
from inference.http.validation import check_range
from inference.vendors.vllm_sampling import SamplingFields, check_sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.services import Limits

SEQUENCE_START, SEQUENCE_END, SEQUENCE_ID = (
    "ts_request_sequence_start",
    "ts_request_sequence_end",
    "ts_request_sequence_id",
)
RESERVED = {"data", "body", SEQUENCE_START, SEQUENCE_END, SEQUENCE_ID}
TEXTS = {"prompt", "lora_adapter", "url_path", "model"}
"""Values that are always text, also if they look like JSON."""
MAX_VALUES = 256


@dataclass(slots=True)
class Input:
    """A decoded input. `fields` are the JSON object's and the further values', which override them."""

    raw: bytes = b""
    """The main value as it came."""
    size: int = 0
    """The bytes of all values."""
    text: str | None = None
    """The prompt, if the main value is text."""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The OpenAI route that the client asked for, such as "v1/completions"; "" for none."""
        return str(self.fields.get("url_path") or "").strip("/")

    @property
    def adapter(self) -> str | None:
        """The adapter that `lora_adapter` or `adapters` name."""
        given = self.fields.get("lora_adapter") or self.fields.get("adapters")
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        if given is not None and (not isinstance(given, str) or not given):
            raise InvalidRequest("lora_adapter must be the name of one adapter", "lora_adapter")
        return given

    @property
    def model(self) -> str:
        """The `model` of an OpenAI body."""
        given = self.fields.get("model") or ""
        if not isinstance(given, str):
            raise InvalidRequest("model must be a string", "model")
        return given


def parse_input(values: Mapping[str, bytes]) -> Input:
    """Decode the values; raises InvalidRequest."""
    if len(values) > MAX_VALUES:
        raise InvalidRequest(f"input must have at most {MAX_VALUES} entries, got {len(values)}", "input")
    given = Input(size=sum(map(len, values.values())))
    main = next((name for name in ("data", "body") if name in values), None)
    if main is not None:
        given.raw = values[main]
        text = _decoded(main, given.raw)
        whole = _object(text)
        given.text, given.fields = (text, {}) if whole is None else (None, whole)
    for name, raw in values.items():
        if name not in RESERVED:
            given.fields[name] = _value(name, _decoded(name, raw))
    if "max_new_tokens" in values and "max_tokens" not in values:  # the object's own has another name
        given.fields["max_tokens"] = given.fields["max_new_tokens"]
    if main is None and not given.fields:
        raise InvalidRequest("input has no `data` and no `body`", "input")
    return given


def flag(values: Mapping[str, bytes], name: str) -> bool:
    """Whether a value is "true"."""
    return values.get(name, b"").strip().lower() == b"true"


def _decoded(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input `{name[:100]}` is not valid UTF-8: this model reads text", name[:100]) from error


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, or None."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return parse_json(text.encode())
    except MalformedBody:  # a prompt may begin with a brace
        return None


def _value(name: str, text: str) -> Any:
    if name in TEXTS or (name == "adapters" and not text.lstrip().startswith("[")):
        return text
    try:
        return parse_value(text.encode())
    except MalformedBody:
        return text


@dataclass(slots=True)
class Asked:
    """What to generate: one of `prompt` and `messages` is set."""

    sampling: SamplingFields
    max_tokens: int | None
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] | None = None


def parse_asked(given: Input, limits: Limits) -> Asked:
    """Check the fields; raises InvalidRequest or NotServed. Unknown names are ignored, as handlers ignore them."""
    fields = dict(given.fields)
    if fields.get("max_new_tokens") is not None:
        fields.setdefault("max_tokens", fields["max_new_tokens"])
    stop = fields.get("stop")
    if stop is not None and not isinstance(stop, str | list):
        fields["stop"] = str(stop)
    known = {name: fields[name] for name in SamplingFields.__struct_fields__ if fields.get(name) is not None}
    try:
        sampling = msgspec.convert(known, SamplingFields, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"input: {error}", "input") from error
    if sampling.n not in (None, 1):
        raise NotServed("n must be 1, except in OpenAI's bodies with `url_path`", "n")
    check_sampling(sampling, limits)
    check_range("max_tokens", sampling.max_tokens, 1, 1 << 31)
    asked = Asked(sampling, sampling.max_tokens)
    messages, prompt = fields.get("messages"), fields.get("prompt", given.text)
    if messages is not None:
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise InvalidRequest("messages must be a list of objects", "messages")
        arguments = fields.get("chat_template_kwargs")
        if not isinstance(arguments, dict | None):
            raise InvalidRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
        asked.messages, asked.template_arguments = messages, arguments
    elif isinstance(prompt, str):
        asked.prompt = prompt
    else:
        raise InvalidRequest("a JSON input needs `prompt`, a string, or `messages`, a list", "input")
    return asked
