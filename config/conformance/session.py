"""The server under test, and the two outcomes of a check besides success: a broken promise, and no permission to look."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import grpc
import httpx2

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = "Question: What is the capital of France?\nAnswer:"
TOKENS = 8
"""Tokens of an answer: enough for several frames of a stream, few enough for a slow machine."""
MAX_SHOWN = 200
"""Characters of an answer that a report repeats."""
NOT_ALLOWED = (401, 403)


class Broken(Exception):
    """The answer is not what the dialect promises; the text says what is wrong."""


class Skipped(Exception):
    """The key that was given may not call this; the text says what would be needed."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server's planes and gRPC services are; an empty one is not checked."""

    front: str
    djl: str = ""
    mindie: str = ""
    triton_grpc: str = ""
    torchserve_grpc: str = ""


@dataclass
class Session:
    """Calls to one server. Answers that are not as a check asks raise Broken."""

    addresses: Addresses
    client: httpx2.Client
    key: str = ""
    wanted_model: str = ""
    root_certificates: bytes | None = None
    """Authorities of gRPC services with TLS, as PEM; None: plain text."""
    timeout_s: float = 60.0
    _channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def get(self, url: str, status: int = 200) -> Any:
        """The JSON of a GET."""
        return parsed(self._call("GET", url, None, status))

    def post(self, url: str, body: Any, status: int = 200) -> Any:
        """The JSON of a POST. `body` is sent as JSON, bytes as they are."""
        return parsed(self._call("POST", url, body, status))

    def text(self, url: str) -> str:
        """The text of a GET."""
        return self._call("GET", url, None, 200).text

    def call(self, method: str, url: str, body: Any = None) -> httpx2.Response:
        """The answer, whatever its status is."""
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {self.key}"} if self.key else {})}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            return self.client.request(method, url, content=content, headers=headers)
        except httpx2.HTTPError as error:
            raise Broken(f"no answer: {type(error).__name__}: {error}") from error

    def events(self, url: str, body: Any) -> list[str]:
        """The data of each event of a stream of server-sent events."""
        answer = self._call("POST", url, body, 200)
        kind = answer.headers.get("content-type", "")
        require(kind.startswith("text/event-stream"), f"the stream's content type is {kind!r}")
        frames = [frame for frame in answer.text.replace("\r\n", "\n").split("\n\n") if frame.strip()]
        data = [
            "\n".join(line[5:].strip() for line in frame.split("\n") if line.startswith("data:")) for frame in frames
        ]
        return [each for each in data if each]

    def channel(self, address: str) -> grpc.Channel:
        """A gRPC channel; one for each address."""
        if address not in self._channels:
            self._channels[address] = (
                grpc.insecure_channel(address)
                if self.root_certificates is None
                else grpc.secure_channel(address, grpc.ssl_channel_credentials(self.root_certificates))
            )
        return self._channels[address]

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What every gRPC call sends."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        for channel in self._channels.values():
            channel.close()

    @cached_property
    def model(self) -> str:
        """The model to ask: the one that was named, else the first of the list."""
        if self.wanted_model:
            return self.wanted_model
        rows = self.get(f"{self.addresses.front}/v1/models")["data"]
        require(rows, "the server lists no model; name one")
        return str(rows[0]["id"])

    @cached_property
    def expected(self) -> str:
        """The text that the prompt has without sampling, by OpenAI's completions: every dialect must give the same."""
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        return str(self.post(f"{self.addresses.front}/v1/completions", body)["choices"][0]["text"])

    def _call(self, method: str, url: str, body: Any, status: int) -> httpx2.Response:
        answer = self.call(method, url, body)
        if answer.status_code in NOT_ALLOWED and answer.status_code != status:
            raise Skipped(f"status {answer.status_code}: the key may not call it")
        require(
            answer.status_code == status,
            f"status {answer.status_code} instead of {status}: {answer.text[:MAX_SHOWN]}",
        )
        return answer


def require(condition: object, otherwise: str) -> None:
    """Raise Broken with this text unless the condition holds."""
    if not condition:
        raise Broken(otherwise)


def same(found: object, wanted: object, what: str) -> None:
    """Raise Broken unless they are equal."""
    require(found == wanted, f"{what} is {found!r} instead of {wanted!r}"[: 3 * MAX_SHOWN])


def has(found: Any, *names: str) -> None:
    """Raise Broken unless a JSON object has these fields."""
    require(isinstance(found, dict), f"no JSON object: {str(found)[:MAX_SHOWN]}")
    missing = [name for name in names if name not in found]
    require(not missing, f"missing: {', '.join(missing)}")


def parsed(answer: httpx2.Response) -> Any:
    """The answer's JSON."""
    try:
        return answer.json()
    except ValueError as error:
        raise Broken(f"no JSON: {answer.text[:MAX_SHOWN]!r}") from error
