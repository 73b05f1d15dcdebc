"""Two instances with roles, each a server of its own, and a coordinator before them: the same answers as one server's."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import suppress
from dataclasses import dataclass

import pytest

from tests import calls
from tests.coordinator import Coordinator
from tests.live import LiveServer, free_port
from tests.mindie_answers import joined
from tests.waiting import eventually, wait_until

pytestmark = [pytest.mark.full, pytest.mark.live]

PROMPT = "Once upon a time there was"
NESTED = {"temperature": 0.7, "seed": 11, "max_new_tokens": 24, "details": True}
PLAIN = {"temperature": 0.7, "seed": 11, "max_tokens": 24}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], **PLAIN}
LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
IDS = [5, 60, 700, 80, 9]
BODIES = {
    "tgi": ("/generate", {"inputs": PROMPT, "parameters": NESTED}),
    "tgi stream": ("/generate_stream", {"inputs": PROMPT, "parameters": NESTED}),
    "root": ("/", {"inputs": PROMPT, "parameters": NESTED}),
    "root stream": ("/", {"inputs": PROMPT, "parameters": NESTED, "stream": True}),
    "vllm": ("/generate", {"prompt": PROMPT, **PLAIN}),
    "vllm stream": ("/generate", {"prompt": PROMPT, "stream": True, **PLAIN}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True, "stop": ["never there"]}),
    "chat schema": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "chat adapter": ("/v1/chat/completions", {**CHAT, "model": "pirate"}),
    "completions": ("/v1/completions", {"model": "demo", "prompt": PROMPT, "stop": [" the"], **PLAIN}),
    "completions greedy": ("/v1/completions", {"model": "demo", "prompt": PROMPT, "stream": True}),
    "native": ("/infer", {"inputs": PROMPT, "parameters": NESTED}),
    "native stream": ("/infer_token", {"input_id": IDS, "parameters": NESTED, "stream": True}),
    "triton": ("/v2/models/demo/generate", {"text_input": PROMPT, "parameters": NESTED}),
    "triton stream": ("/v2/models/demo/generate_stream", {"text_input": PROMPT, "parameters": NESTED}),
    "tensors": ("/v2/models/demo/infer", {
        "inputs": [{"name": "input0", "shape": [1, 5], "datatype": "UINT32", "data": IDS, "parameters": NESTED}],
        "outputs": [{"name": "output0"}],
    }),
}  # fmt: skip


@dataclass
class Member:
    """One instance, and the port of calls from others."""

    server: LiveServer
    port: int
    number: int

    def node(self) -> dict[str, object]:
        device = {"device_id": "0", "device_ip": "29.0.0.1", "device_logical_id": "0"}
        return {"server_ip": "127.0.0.1", "host_ip": "127.0.0.1", "id": self.number, "inter_comm_port": self.port,
                "device": [device]}  # fmt: skip

    def become(self, role: str, peer: Member) -> None:
        body = {"local": self.node(), "peers": [peer.node()]}
        answer = calls.post(f"{self.server.management_url}/v1/role/{role}", json=body, timeout=60)
        assert (answer.status_code, answer.content) == (200, b'{"result":"ok"}')

    def stop(self, request_id: str) -> int:
        """stopInfer, as a coordinator sends it."""
        url = f"{self.server.mindie_url}/v2/models/demo/stopInfer"
        return calls.post(url, json={"id": request_id}, headers={"req-id": request_id}, timeout=60).status_code

    def results_refused(self) -> str:
        """Why /dresult gives nothing."""
        answer = calls.get(f"{self.server.mindie_url}/dresult", timeout=60)
        return str(answer.json()["error"])

    def status(self) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = calls.get(f"{self.server.management_url}/v1/status", timeout=60).json()
        return found

    def wait_ready(self) -> None:
        wait_until(lambda: self.status()["service"]["roleStatus"] == "RoleReady", 60, self.status)


@dataclass
class Pair:
    prefill: Member
    decode: Member

    def link(self) -> None:
        self.prefill.become("prefill", self.decode)
        self.decode.become("decode", self.prefill)
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def coordinator(self) -> Coordinator:
        return Coordinator(
            self.prefill.server.mindie_url, self.decode.server.mindie_url, f"127.0.0.1;{self.decode.port}"
        )  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    members = []
    for number in (1, 2):
        port = free_port()
        settings = {"DRAGOMAN_MINDIE_INFER_MODE": "dmi", "DRAGOMAN_MINDIE_INTER_COMM_PORT": str(port)}
        server = LiveServer(tmp_path_factory.mktemp(f"member{number}") / "var", environment=settings)
        members.append(Member(server.start(wait=False), port, number))
    made = Pair(*members)
    try:
        for member in members:
            member.server.wait_ready()
        made.link()
        yield made
    except BaseException:
        for member in members:
            member.server.stop(signal.SIGKILL)
        raise
    for member in members:
        assert member.server.stop() == 0, member.server.log


def alone(server, path, body, request_id):
    """What one server without a role answers."""
    answer = calls.post(server.mindie_url + path, json=body, headers={"req-id": request_id}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_answers_are_those_of_one_server(pair, server):
    expected = {name: alone(server, *BODIES[name], str(1000 + i)) for i, name in enumerate(BODIES)}
    async with pair.coordinator() as coordinator:
        answers = {name: await coordinator.ask(*BODIES[name]) for name in BODIES}
    assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(BODIES, 200)
    pairs = {name: (joined(answers[name].body), joined(expected[name])) for name in BODIES}
    assert not {name: (split, one) for name, (split, one) in pairs.items() if split != one}


async def test_many_at_once(pair, server):
    bodies = [{"model": "demo", "prompt": f"{PROMPT} {n}", "max_tokens": 32, "stream": True} for n in range(12)]
    expected = [alone(server, "/v1/completions", body, str(1000 + n)) for n, body in enumerate(bodies)]
    async with pair.coordinator() as coordinator:
        answers = await asyncio.gather(*(coordinator.ask("/v1/completions", body) for body in bodies))
    # Ids are given out in the order in which the requests begin.
    assert [joined(a.body) for a in answers] == [joined(e) for e in expected]
    await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 0)


async def test_blocks_come_from_the_other_instance(pair, server):
    """A long prompt is computed once."""
    body = {"model": "demo", "prompt": "One two three four. " * 40, "max_tokens": 16, "stream": True}
    expected = alone(server, "/v1/completions", body, "1000")
    fetched = pair.decode.server.metric("dragoman_kv_blocks_fetched_total")
    async with pair.coordinator() as coordinator:
        answer = await coordinator.ask("/v1/completions", body)
    assert joined(answer.body) == joined(expected)
    await eventually(lambda: pair.decode.server.metric("dragoman_kv_blocks_fetched_total") > fetched + 5)
    assert pair.decode.server.metric("dragoman_kv_transfer_failures_total") == 0
    await eventually(lambda: pair.prefill.server.metric("dragoman_kv_blocks_held") == 0)


async def test_a_second_reader_ends_the_first_ones_stream(pair):
    async with pair.coordinator() as first, pair.coordinator() as second:
        async with asyncio.timeout(60):
            await first.lost.wait()
        assert first.closed == "new connection is to established, close the old one."
        answer = await second.ask("/infer", {"inputs": PROMPT})
        assert "generated_text" in answer.json()


async def test_a_client_that_hangs_up(pair):
    """The coordinator stops the request at both instances."""
    async with pair.coordinator() as coordinator:
        asked = asyncio.create_task(coordinator.ask("/v1/completions", LONG, request_id="abc"))
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 1)
        stops = [
            member.stop("abc")
            for member in (pair.decode, pair.prefill)
        ]  # fmt: skip
        assert stops == [200, 404]
        answer = await asked
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 0)


async def test_a_role_changes_while_a_request_runs(pair, server):
    expected = alone(server, "/v1/completions", LONG, "1000")
    async with pair.coordinator() as coordinator:
        asked = asyncio.create_task(coordinator.ask("/v1/completions", LONG))
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 1)
        pair.decode.become("prefill", pair.prefill)
        assert pair.decode.results_refused() == "Only the Decode node supports dresult but you send to prefill"
        assert joined((await asked).body) == joined(expected)
    pair.decode.become("decode", pair.prefill)
    pair.decode.wait_ready()


@pytest.mark.slow
async def test_a_worker_dies(pair, server):
    """Another one goes on, or the coordinator gets the request back; no token is lost."""
    chat = {**CHAT, "max_tokens": 1200, "stream": True, "ignore_eos": True}
    expected = alone(server, "/v1/chat/completions", chat, "1000")
    async with pair.coordinator() as coordinator:
        asked = asyncio.create_task(coordinator.ask("/v1/chat/completions", chat))
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 1)
        for worker in pair.decode.server.workers():
            worker.kill()
        answer = await asked
    assert joined(answer.body) == joined(expected)


@pytest.mark.slow
async def test_a_decode_instance_dies(pair):
    """The coordinator sees it at once; later requests are refused until the instance is back."""
    async with pair.coordinator() as coordinator:
        asked = asyncio.create_task(coordinator.ask("/v1/completions", LONG))
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 1)
        pair.decode.server.stop(signal.SIGKILL)
        async with asyncio.timeout(60):
            await coordinator.lost.wait()
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        refused = await coordinator.ask("/infer", {"inputs": PROMPT})
        assert refused.status == 500
        assert json.loads(refused.body)["error"].startswith("[P Node] Send D request failed:")
    pair.decode.server.start()
    pair.decode.become("decode", pair.prefill)
    pair.decode.wait_ready()
    async with pair.coordinator() as coordinator:
        assert (await coordinator.ask("/infer", {"inputs": PROMPT})).status == 200
