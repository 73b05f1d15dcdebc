"""Streams that promise a frame for each step keep to it for readers that lag."""

from __future__ import annotations

import pytest

from tests.unit.scripts import Gate, Script, ids

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 60}
TOKENS = [*ids(" of Spain" * 20), 2]
STREAMS = {
    "MindIE's chats": ("mindie", "/v1/chat/completions", CHAT),
    "MindIE's own form": (
        "mindie",
        "/infer",
        {"inputs": "Hello", "stream": True, "parameters": {"max_new_tokens": 60}},
    ),
    "MindIE's /generate_stream": (
        "mindie",
        "/generate_stream",
        {"inputs": "Hello", "parameters": {"max_new_tokens": 60}},
    ),
    "TGI": ("front", "/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 60}}),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_frame_for_each_step(start, name):
    plane, path, body = STREAMS[name]
    serving = await start()
    serving.worker.default = Script(tokens=TOKENS)
    usual = await serving.post(path, body, plane=plane)
    gate = Gate()
    serving.worker.default = Script(tokens=TOKENS, gate_after=len(TOKENS) - 1, gate=gate)
    call = serving.begin(path, body, plane=plane)
    await call.chunks(1)
    call.read_no_more()
    await gate.reached.wait()
    gate.open()
    call.read_on()
    lagging = await call.end()
    assert len(lagging.chunks) == len(usual.chunks) >= len(TOKENS) - 1
