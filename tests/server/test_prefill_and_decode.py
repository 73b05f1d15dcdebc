"""A server with one worker that prefills and one that decodes: its answers are those of one worker doing both."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.live import LiveServer, events, wait_until

STORY = "Once upon a time there was a king. " * 12
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
SAMPLED = {"max_tokens": 40, "temperature": 0.9, "seed": 11, "ignore_eos": True}
CALLS = [
    ("/v1/completions", {"prompt": STORY, **SAMPLED, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": STORY, **SAMPLED, "n": 2, "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": STORY, **SAMPLED, "prompt_logprobs": 1, "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": STORY}], "seed": 1, "max_tokens": 30, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    ("/generate", {"inputs": STORY, "parameters": {"max_new_tokens": 20, "details": True, "seed": 3, "do_sample": True}}),
]  # fmt: skip


@pytest.fixture
def live(tmp_path):
    server = LiveServer(tmp_path / "var").start()
    yield server
    assert server.stop() == 0, server.log


def command(server: LiveServer, *arguments: str) -> str:
    """What a command of `manage.py` prints."""
    asked = [sys.executable, "-W", "ignore", "manage.py", *arguments]
    done = subprocess.run(asked, cwd=ROOT, env=server.settings(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def said(server: LiveServer, path: str, body: dict[str, object]) -> object:
    """What an answer says, without its id and time."""
    answer = server.post(path, {"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found.get("choices", found)


def test_one_prefills_and_one_decodes(live):
    alone = [said(live, path, body) for path, body in CALLS]
    command(live, "change", "demo", "--min-workers", "2", "--max-workers", "2", "--prefill-workers", "1")
    wait_until(lambda: _fetched(live), 180, lambda: live.log)
    assert [said(live, path, body) for path, body in CALLS] == alone
    assert live.metric("dragoman_kv_transfer_failures_total") == 0
    stream = live.post(
        "/v1/completions", {"model": "demo", "prompt": STORY, **SAMPLED, "temperature": 0, "stream": True}
    )
    text = "".join(event["choices"][0]["text"] for event in events(stream) if isinstance(event, dict))
    assert text == alone[0][0]["text"]
    _asks_as_a_proxy_does(live)
    live.wait_idle()
    wait_until(lambda: live.metric("dragoman_kv_blocks_held") == 0)


def _asks_as_a_proxy_does(live: LiveServer) -> None:
    """One token at first, then all of it with the parameters of that answer."""
    body = {"model": "demo", "prompt": "A proxy asks. " * 11, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = live.post("/v1/completions", {**body, "cache_salt": "other"}).json()
    remote = {"do_remote_decode": True}
    first = live.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": remote}).json()
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"]
    before = live.metric("dragoman_kv_blocks_fetched_total")
    second = live.post("/v1/completions", {**body, "kv_transfer_params": params}).json()
    assert second["choices"] == expected["choices"]
    wait_until(lambda: live.metric("dragoman_kv_blocks_fetched_total") == before + len(params["remote_block_ids"]))


def _fetched(live: LiveServer) -> float:
    """Ask something, and look whether blocks have been fetched: then the second worker is there."""
    said(live, "/v1/completions", {"prompt": "Another story. " * 9, "max_tokens": 3, "ignore_eos": True})
    return live.metric("dragoman_kv_blocks_fetched_total")
