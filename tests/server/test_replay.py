"""Two real workers, of which one ends in mid-stream: every client gets what it would have got anyway."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import defaultdict

import psutil
import pytest

from tests import calls
from tests.conftest import ROOT
from tests.live import LiveServer, wait_until

PROMPT = "Once upon a time"
LONG = {"max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 1.5, "seed": 1}
HOT = {"max_new_tokens": 900, "do_sample": True, "temperature": 5.0, "seed": 1, "details": True}
ITEMS = {"type": "array", "items": {"enum": [1, 2, 3, "a", "b"]}, "minItems": 200, "maxItems": 200}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": ITEMS}}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
STREAMS = [
    ("front", "/v1/completions", {"prompt": PROMPT, **LONG, "temperature": 0, "logprobs": 2}),
    ("front", "/v1/completions", {"prompt": PROMPT, **LONG, "n": 2, "frequency_penalty": 0.5, "stop": ["never said"]}),
    ("front", "/v1/chat/completions", {**CHAT, **LONG, "logprobs": True, "top_logprobs": 2}),
    ("front", "/v1/chat/completions", {**CHAT, **LONG, "ignore_eos": False, "response_format": FORM}),
    ("front", "/generate_stream", {"inputs": "a", "parameters": {**HOT, "top_n_tokens": 2}}),
    ("front", "/v2/models/demo/generate_stream", {"text_input": PROMPT, **LONG, "seed": 3}),
    ("mindie", "/v2/models/demo/generate_stream", {"text_input": "a", "parameters": HOT}),
    ("mindie", "/infer", {"inputs": "a", "stream": True, "parameters": {**HOT, "details": False}}),
    ("front", "/v1/completions", {"prompt": PROMPT, **LONG, "stream": False, "logprobs": 1, "prompt_logprobs": 1}),
]
TWO_REPLICAS = """
from management.models import Deployment
from management.services.deployments import start_deployment
start_deployment(Deployment.objects.get(is_default=True), "tester", replicas=2)
"""
VARYING = {"id", "created", "request_id", "prefill_time", "decode_time", "queue_wait_time", "batch_size", "perf_stat"}
CONSTANT = {"object", "model", "index", "role", "finish_reason", "stop_reason", "model_name", "model_version"}
"""In every event of a stream."""
SO_FAR = "generated_tokens"
"""A count that grows from event to event."""


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, server: LiveServer, number: int) -> None:
        super().__init__()
        plane, self.path, self.body = STREAMS[number]
        self.url = (server.url if plane == "front" else server.mindie_url) + self.path
        self.received, self.begun = "", threading.Event()

    def run(self) -> None:
        with calls.stream("POST", self.url, content=json.dumps(self.body), timeout=120) as answer:
            for part in answer.iter_text():
                self.received += part
                self.begun.set()

    @property
    def streams(self) -> bool:
        return self.body.get("stream", True)

    @property
    def content(self) -> dict[str, object]:
        """What the events say together; how many tokens are in one event depends on when they are read."""
        if not self.streams:
            return joined([json.loads(self.received)])
        lines = [line.removeprefix("data:").strip() for line in self.received.splitlines() if line.startswith("data:")]
        assert lines, self.received
        content = joined([json.loads(line) for line in lines if line != "[DONE]"])
        if self.path == "/infer":  # the last event's token has no text, however many tokens it stands for
            del content["/token/text"]
        return content


def joined(events: list[object]) -> dict[str, object]:
    """By the path of a field: its values in order; texts are joined. Ids and times are left out."""
    values: dict[str, list[object]] = defaultdict(list)

    def collect(path: str, value: object) -> None:
        key = path.rpartition("/")[2]
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in VARYING:
                    collect(f"{path}{value['index']}/{name}" if key == "choices" else f"{path}/{name}", inner)
        elif isinstance(value, list):
            for inner in value:
                collect(path, inner)
        elif key == SO_FAR:
            values[path] = [value]
        elif value is not None and (key not in CONSTANT or value not in values[path]):
            values[path].append(value)

    for event in events:
        collect("", event)
    texts = {path: all(isinstance(value, str) for value in found) for path, found in values.items()}
    return {path: "".join(found) if texts[path] else found for path, found in values.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    environment = {"DRAGOMAN_SPECULATIVE_TOKENS": "0", "DRAGOMAN_REPLAY_WAIT_S": "120"}
    live = LiveServer(tmp_path_factory.mktemp("replay") / "var", environment=environment).start()
    command = [sys.executable, "-W", "ignore", "manage.py", "shell", "-c", TWO_REPLICAS]
    subprocess.run(command, cwd=ROOT, env=live.settings(), check=True, capture_output=True)
    yield live
    assert live.stop() == 0, live.log


@pytest.fixture(scope="module")
def undisturbed(server):
    """What each stream says when it runs alone."""
    contents = []
    for number in range(len(STREAMS)):
        reader = Reader(server, number)
        reader.run()
        contents.append(reader.content)
    return contents


def wait_for_two(server):
    """Both workers are connected."""

    def connected() -> bool:
        events = [
            line for line in server.log.splitlines() if "worker connected" in line or "worker disconnected" in line
        ]
        return sum(1 if "worker connected" in line else -1 for line in events) == 2

    wait_until(connected, 90, lambda: server.log)


def kill(worker: psutil.Process) -> None:
    worker.kill()


def hand_over(worker: psutil.Process) -> None:
    """Signals that arrive together are one, so more than two are sent."""

    def ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker.status() != psutil.STATUS_ZOMBIE:
                worker.send_signal(signal.SIGTERM)
                return False
        return True

    wait_until(ended, 60, every_s=0.02)


@pytest.mark.parametrize(("end", "cause"), [(kill, "worker_died"), (hand_over, "moved")])
def test_one_of_two_workers_ends_in_mid_stream(server, undisturbed, end, cause):
    wait_for_two(server)
    before = server.metric("dragoman_replays_total", cause=cause)
    readers = [Reader(server, number) for number in range(len(STREAMS))]
    for reader in readers:
        reader.start()
    assert all(reader.begun.wait(60) for reader in readers if reader.streams)
    end(server.workers()[0])
    for reader in readers:
        reader.join(120)
    for reader, expected in zip(readers, undisturbed, strict=True):
        assert reader.content == expected, reader.path
    assert server.metric("dragoman_replays_total", cause=cause) >= before + 3
