"""MindIE's answers, as far as they are the same from run to run: what frames say together, without times."""

from __future__ import annotations

import json

VARYING = ("created", "prefill_time", "decode_time", "batch_size", "queue_wait_time", "seed", "cached_tokens")


def steady(value):
    """A frame without what differs from run to run, and with what a server's prefix cache has."""
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if k not in VARYING}
    return [steady(each) for each in value] if isinstance(value, list) else value


TEXTS = {"text", "content", "text_output"}


def joined(body: bytes) -> object:
    """A whole answer; or what a stream's frames say together: steps may share one, if a reader lags."""
    rest, found = body.decode(), []
    streamed = "\0" in rest or rest.lstrip().startswith("data:")
    while rest := rest.lstrip("\0\n").removeprefix("data:").strip():
        if rest == "[DONE]":
            found.append(rest)
            break
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(steady(value))
        rest = rest[end:]
    if not streamed:
        return found[0]
    told: dict[str, object] = {}
    for frame in found:
        _gather("", frame, told)
    if told.get(".generated_text"):  # the last frame has all of it, and no text of its own, however many tokens it has
        told.pop(".token.text")
    return told


def _gather(path: str, value: object, told: dict[str, object]) -> None:
    name = path.rsplit(".", 1)[-1]
    if isinstance(value, dict):
        for key, each in value.items():
            _gather(f"{path}.{key}", each, told)
    elif name in TEXTS:
        told[path] = (told.get(path) or "") + (value if isinstance(value, str) else "".join(value or []))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        _gather(path, value[0], told)
    elif name == "id" and isinstance(value, list):
        told[path] = [*told.get(path, []), *value]
    elif value is not None or path not in told:
        told[path] = value
