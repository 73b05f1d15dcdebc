"""A client of MindIE's EndPoint that is as strict as MindIE's own (`test_mindies_own_client.py`): it takes one HTTP chunk at a time.

It strips the letters of "data:" from a chunk's start and newlines and NULs from its end, splits merged frames only where they look
like Triton's or vLLM's, and needs the keys that MindIE's client indexes without asking.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import urllib3


class MindieError(Exception):
    """The server answered with `error`, or with something that is no frame."""


class MindieClient:
    def __init__(self, url: str, management_url: str) -> None:
        self.url, self.management_url = url, management_url
        self._pool = urllib3.PoolManager(timeout=60, retries=False)

    def is_server_live(self) -> bool:
        return self._get(self.management_url, "/v2/health/live") == 200

    def is_server_ready(self) -> bool:
        return self._get(self.management_url, "/v2/health/ready") == 200

    def is_model_ready(self, model: str, version: str = "") -> bool:
        middle = f"/versions/{version}" if version else ""
        return self._get(self.management_url, f"/v2/models/{model}{middle}/ready") == 200

    def get_slot_count(self, model: str) -> dict[str, Any]:
        return self._json("GET", self.management_url, f"/v2/models/{model}/getSlotCount")

    def get_model_metadata(self, model: str) -> dict[str, Any]:
        return self._json("GET", self.url, f"/v2/models/{model}")

    def get_model_config(self, model: str) -> dict[str, Any]:
        return self._json("GET", self.url, f"/v2/models/{model}/config")

    def infer(self, model: str, ids: np.ndarray, output: str, **parameters: Any) -> np.ndarray:
        tensor = {"name": "input0", "shape": list(ids.shape), "datatype": "UINT32", "data": ids.flatten().tolist()}
        body = {"id": uuid.uuid4().hex, "inputs": [tensor], "outputs": [{"name": output}], "parameters": parameters}
        answer = self._json("POST", self.url, f"/v2/models/{model}/infer", body)
        found = next(each for each in answer["outputs"] if each["name"] == output)
        return np.array(found["data"], dtype=np.uint32).reshape(found["shape"])

    def generate(self, model: str, prompt: str, **parameters: Any) -> str:
        body = {"id": uuid.uuid4().hex, "text_input": prompt, "parameters": parameters}
        return self._json("POST", self.url, f"/v2/models/{model}/generate", body)["text_output"]

    def generate_stream(
        self, model: str, prompt: str, request_id: str = "", **parameters: Any
    ) -> Iterator[dict[str, Any]]:
        body = {
            "id": request_id or uuid.uuid4().hex, "text_input": prompt, "details": True,
            "parameters": {**parameters, "details": True},
        }  # fmt: skip
        for frame in self.stream(f"/v2/models/{model}/generate_stream", body):
            assert {"batch_size", "queue_wait_time", "generated_tokens"} <= set(frame["details"])
            yield frame

    def cancel(self, model: str, request_id: str) -> bool:
        return self._json("POST", self.url, f"/v2/models/{model}/stopInfer", {"id": request_id})["id"] == request_id

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The frames of any dialect's stream."""
        answer = self._pool.request(
            "POST",
            self.url + path,
            body=json.dumps(body),
            preload_content=False,
            headers={"content-type": "application/json"},
        )
        if answer.status != 200:
            raise MindieError(json.loads(answer.data)["error"])
        for chunk in answer.read_chunked():
            text = chunk.decode()  # a frame is never cut inside a character
            parts = text.replace("}\n\ndata:{", "}\0{").split("}\0{")
            for index, part in enumerate(parts):
                part = ("{" if index else "") + part + ("}" if index < len(parts) - 1 else "")
                part = part.lstrip("data:").lstrip().rstrip("\n\0")  # noqa: B005  the letters, as MindIE's client does
                if part == "[DONE]":
                    return
                try:
                    yield json.loads(part)
                except json.JSONDecodeError as error:
                    raise MindieError(part) from error

    def _get(self, base: str, path: str) -> int:
        assert urlsplit(base).scheme in ("http", "https")
        return self._pool.request("GET", base + path).status

    def _json(self, method: str, base: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = self._pool.request(method, base + path, body=None if body is None else json.dumps(body))
        value = json.loads(answer.data)
        if answer.status != 200 or "error" in value:
            raise MindieError(value["error"])
        return value
