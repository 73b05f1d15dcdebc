"""MindIE's instances with roles, over fake workers: what one answers, what goes to the other, and what that one sends on."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from engine.kv_transfer.handle import KvSource
from inference.dialects.mindie.disaggregation.decode import near
from inference.dialects.mindie.disaggregation.peers import PeerError
from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb
from inference.dialects.mindie.settings import MindieSettings
from tests.live import free_port
from tests.mindie_answers import joined
from tests.unit.mindie_instances import Pair, node
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Where?"}]}
BODIES = {
    "tgi": ("/generate", {"inputs": "Where?", "parameters": {"details": True, "return_full_text": True}}),
    "tgi-stream": ("/generate_stream", {"inputs": "Where?", "parameters": {"details": True}}),
    "root": ("/", {"inputs": "Where?"}),
    "root-stream": ("/", {"inputs": "Where?", "stream": True}),
    "vllm": ("/generate", {"prompt": "Where?"}),
    "vllm-stream": ("/generate", {"prompt": "Where?", "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat-stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("/v1/completions", {"model": "demo", "prompt": "Where?"}),
    "completions-stream": ("/v1/completions", {"model": "demo", "prompt": "Where?", "stream": True}),
    "native": ("/infer", {"inputs": "Where?", "parameters": {"details": True}}),
    "native-stream": ("/infer_token", {"input_id": [5, 6], "stream": True, "parameters": {"details": True}}),
    "triton": ("/v2/models/demo/generate", {"id": "t", "text_input": "Where?", "parameters": {"details": True}}),
    "triton-stream": ("/v2/models/demo/generate_stream", {"id": "t", "text_input": "Where?"}),
    "triton-details": ("/v2/models/demo/generate_stream", {
        "id": "t", "text_input": "Where?", "parameters": {"details": True}
    }),
    "tensors": ("/v2/models/demo/infer", {
        "id": "t", "inputs": [{"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [5, 6]}],
        "outputs": [{"name": "output0"}],
    }),
}  # fmt: skip


async def whole(pair: Pair, path: str, body: object, request_id: str = "1", results_id: str = "") -> bytes:
    """What a client gets through both."""
    reader = pair.read()
    answer = await pair.ask(path, body, request_id)
    assert answer.status == 200, answer.text
    told = answer.json()
    if told.get("isLastResp"):
        return told["output"].encode()
    assert list(told) == (["reqId", "isStream", "isLastResp", "output"] if told["isStream"] else ["reqId", "isStream"])
    results = await reader.until_last(results_id or request_id)
    reader.call.hang_up()
    assert [keyword for keyword, _ in results] == ["data"] * (len(results) - 1) + ["lastData"]
    return told.get("output", "").encode() + b"".join(payload for _, payload in results)


@pytest.mark.parametrize("name", BODIES)
async def test_both_together_answer_as_one_server(pair, start, name):
    path, body = BODIES[name]
    alone = await start()
    script = says(" Madrid is far away")
    pair.prefill.serving.worker.default = pair.decode.serving.worker.default = alone.worker.default = script
    expected = await alone.post(path, body, plane="mindie", req_id="1")
    assert expected.status == 200, expected.text
    results_id = "t" if name in ("triton", "triton-stream", "triton-details") else ""
    got = await whole(pair, path, body, results_id=results_id)
    assert joined(got) == joined(expected.body)
    sent = pair.decode.serving.worker.submits[-1]
    assert (sent.generated, sent.prompt_token_ids) == (script.tokens[:1], alone.worker.submits[-1].prompt_token_ids)
    assert sent.params.max_tokens == alone.worker.submits[-1].params.max_tokens
    first = pair.prefill.serving.worker.submits[-1]
    assert (first.params.max_tokens, first.params.seed) == (1, sent.params.seed)
    assert (sent.source.transfer_id, sent.hold) == (first.hold, "")
    await eventually(lambda: pair.prefill.serving.worker.released == [first.hold])
    assert pair.prefill.instance.held == {}
    await eventually(lambda: not pair.decode.instance.decoding)
    assert pair.decode.serving.services.admission.in_flight == 0


@pytest.mark.parametrize(("body", "stream"), [({**CHAT, "max_tokens": 1}, False), ({**CHAT, "stream": True}, True)])
async def test_an_end_with_the_first_token_needs_no_other_instance(pair, body, stream):
    pair.prefill.serving.worker.default = Script(tokens=[2]) if stream else says(" Madrid")
    told = (await pair.ask("/v1/chat/completions", body)).json()
    assert (told["reqId"], told["isStream"], told["isLastResp"]) == ("1", stream, True)
    assert told["output"].endswith("data: [DONE]\n\n") if stream else json.loads(told["output"])["choices"]
    assert pair.decode.serving.worker.submits == []


async def test_a_stop_string_in_the_first_token_needs_no_other_instance(pair):
    pair.prefill.serving.worker.default = says(" Madrid is far")
    told = (await pair.ask("/v1/chat/completions", {**CHAT, "stop": [" "]})).json()
    worker = pair.prefill.serving.worker
    await eventually(lambda: worker.released == [worker.submits[-1].hold])
    assert told["isLastResp"]
    assert json.loads(told["output"])["choices"][0]["finish_reason"] == "stop"
    assert pair.decode.serving.worker.submits == []


async def test_sampling_travels(pair):
    body = {**CHAT, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "frequency_penalty": 0.3,
            "presence_penalty": -0.2, "seed": 7, "stop": ["never"], "stop_token_ids": [9], "ignore_eos": True,
            "max_tokens": 9, "include_stop_str_in_output": True, "skip_special_tokens": False,
            "response_format": {"type": "json_object"}}  # fmt: skip
    await whole(pair, "/v1/chat/completions", body)
    first, then = (member.serving.worker.submits[-1] for member in (pair.prefill, pair.decode))
    assert (first.params.max_tokens, then.params.max_tokens) == (1, 9)
    assert then.params == msgspec.structs.replace(first.params, max_tokens=9)
    assert then.params.temperature == 0.7
    assert then.cache_salt == first.cache_salt


MUST = "DMI request must have req-type, req-id, d-target headers"
ADDRESS = "Parameter d-target must be an IPv4 address"


@pytest.mark.parametrize(("headers", "error"), [
    ({"req_type": ""}, MUST),
    ({"req_id": ""}, MUST),
    ({"d_target": ""}, MUST),
    ({"req_id": "xyz"}, "Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got xyz"),
    ({"req_id": "a" * 1025}, "The length of req-id cannot exceed 1024"),
    ({"req_id": "a" * 1025, "req_type": "x"}, "The length of req-id cannot exceed 1024"),
    ({"req_type": "decode", "d_target": "x"}, "Parameter req-type must be prefill but got decode"),
    ({"d_target": "host"}, ADDRESS),
    ({"d_target": "::1"}, ADDRESS),
    ({"d_target": "127.0.0.1;0"}, ADDRESS),
    ({"d_target": "127.0.0.1;x"}, ADDRESS),
    ({"is_recompute": "yes"},
     "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."),
])  # fmt: skip
async def test_headers(pair, headers, error):
    named = {"req_type": "prefill", "req_id": "1", "d_target": pair.target, **headers}
    answer = await pair.prefill.serving.post("/generate", b"{", plane="mindie", **named)
    assert (answer.status, answer.json()) == (400, {"error": error, "error_type": "Bad Request"})


async def test_headers_are_ignored_without_roles(start):
    serving = await start()
    answer = await serving.post("/infer", {"inputs": "a"}, plane="mindie", req_type="x", d_target="y")
    assert answer.status == 200


async def test_only_instances_that_prefill_take_requests(pair, members):
    answer = await pair.decode.serving.post("/generate", b"{", plane="mindie")
    assert answer.status == 400
    assert answer.json()["error"].startswith("DMI inference requests can be sent only to the prefill node")
    fresh = await members()
    answer = await fresh.serving.post("/generate", b"{", plane="mindie")
    unknown = "The server cannot process the inference request due to an unknown status. "
    assert (answer.status, answer.json()) == (503, {"error": unknown, "error_type": "Service Unavailable"})


@pytest.mark.parametrize(("path", "body", "error"), [
    ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1}, "n must be 1 in dmi mode"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}, "logprobs is not supported in dmi mode"),
    ("/v1/completions", {"model": "demo", "prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 4},
     "use_beam_search is not supported in dmi mode"),
    ("/generate", {"inputs": "a", "parameters": {"stop": ["x"]}}, "stop is not supported in dmi mode"),
    ("/generate", {"prompt": "a", "stop": ["x"]}, "stop is not supported in dmi mode"),
])  # fmt: skip
async def test_what_roles_cannot_do(pair, path, body, error):
    answer = await pair.ask(path, body)
    assert (answer.status, answer.json()) == (422, {"error": error, "error_type": "Input Validation Error"})


async def test_adapters_cannot_be_loaded(pair):
    answer = await pair.prefill.serving.post(
        "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, plane="management"
    )
    assert (answer.status, answer.text) == (200, "Multi Lora does not support PD separation!")
    assert pair.prefill.serving.adapters == ()


async def test_a_decode_instance_that_is_away(pair):
    away = free_port()
    await pair.prefill.become("prefill", 1, node(2, pair.decode.port), node(3, away))
    answer = await pair.ask("/infer", {"inputs": "a"}, d_target=f"127.0.0.1;{away}")
    assert answer.status == 500
    assert answer.json()["error"].startswith("[P Node] Send D request failed:")
    worker = pair.prefill.serving.worker
    await eventually(lambda: worker.released == [worker.submits[-1].hold])


@pytest.mark.parametrize("target", ["127.0.0.1;{other}", "127.0.0.2;{decode}"])
async def test_only_peers_are_called(pair, target):
    """A client that names another address learns nothing of it."""
    async with await asyncio.start_server(lambda *_: pytest.fail("called"), "127.0.0.1") as other:
        named = target.format(other=other.sockets[0].getsockname()[1], decode=pair.decode.port)
        answer = await pair.ask("/infer", {"inputs": "a"}, d_target=named)
    error = "Parameter d-target must be the address of this instance or of one of its peers"
    assert (answer.status, answer.json()) == (400, {"error": error, "error_type": "Bad Request"})
    assert pair.prefill.serving.worker.submits == []


async def test_a_request_sent_to_an_instance_that_does_not_decode(pair):
    answer = await pair.ask("/infer", {"inputs": "a"}, d_target=f"127.0.0.1;{pair.prefill.port + 0}")
    assert answer.status == 200  # this very instance: it is an ordinary request
    assert "generated_text" in answer.json()
    await pair.decode.become("prefill", 2, node(1, pair.prefill.port))
    answer = await pair.ask("/infer", {"inputs": "a"})
    assert answer.json()["error"] == "[P Node] Send D request failed:this node is not a decode node"


@pytest.mark.parametrize(("script", "error"), [
    (Script(fail_after=0), "[P Node] Failed to get tokenIds from inferResponse."),
])  # fmt: skip
async def test_failures_of_the_first_token(pair, script, error):
    pair.prefill.serving.worker.default = script
    answer = await pair.ask("/infer", {"inputs": "a"})
    assert (answer.status, answer.json()["error"]) == (500, error)


async def test_a_failure_of_the_decode_instance(pair):
    pair.decode.serving.worker.default = Script(tokens=ids(" Madrid is far"), fail_after=2)
    pair.prefill.serving.worker.default = says(" Madrid is far")
    reader = pair.read()
    await pair.ask("/infer", {"inputs": "a", "stream": True})
    assert (await reader.until_last("1"))[-1] == ("error", b"Failed forward in for infer engine.")


async def test_a_request_is_stopped_at_the_decode_instance(pair):
    gate = Gate()
    pair.prefill.serving.worker.default = says(" Madrid is far")
    pair.decode.serving.worker.default = Script(tokens=ids(" Madrid is far"), gate_after=2, gate=gate)
    reader = pair.read()
    await pair.ask("/infer", {"inputs": "a", "stream": True})
    await gate.reached.wait()
    stopped = await pair.decode.serving.post("/v2/models/demo/stopInfer", {"id": "1"}, plane="mindie", req_id="1")
    assert stopped.status == 200
    keyword, payload = (await reader.until_last("1"))[-1]
    assert keyword == "lastData"
    assert b'"text":null' in payload


async def test_the_deadline_counts_from_the_first_instance(members):
    pair = Pair(await members(), await members(mindie=MindieSettings(e2e_timeout_s=1)))
    await pair.link()
    gate = Gate()
    pair.prefill.serving.worker.default = says(" Madrid is far")
    pair.decode.serving.worker.default = Script(tokens=ids(" Madrid is far"), gate_after=1, gate=gate)
    reader = pair.read()
    await pair.ask("/infer", {"inputs": "a"})
    keyword, text = (await reader.until_last("1"))[-1]
    assert (keyword, text) == ("error", b"Engine callback timeout: server e2eTimeout")


@pytest.mark.parametrize(("changes", "error"), [
    ({"reqId": ""}, "the decode parameters are invalid: reqId"),
    ({"msgType": 7}, "the decode parameters are invalid: msgType"),
    ({"firstToken": []}, "the decode parameters are invalid: tokens"),
    ({"prefillTokenNum": 9}, "the decode parameters are invalid: tokens"),
    ({"firstToken": [1 << 40]}, "Failed to enqueue inferRequest. Invalid Input Ids"),
    ({"tokens": [-1]}, "Failed to enqueue inferRequest. Invalid Input Ids"),
    ({"maxNewToken": 1}, "the decode parameters are invalid: maxNewToken"),
    ({"loraId": "none"}, "the decode parameters are invalid: loraId"),
    ({"tools": "{"}, "the decode parameters are invalid: tools"),
    ({"samplingParams": {"responseFormat": "[]"}}, "the decode parameters are invalid: responseFormat"),
    ({"samplingParams": {"stopStrings": {"value": "-"}}}, "the decode parameters are invalid: stopStrings"),
    ({"samplingParams": {"topP": {"value": 2}}}, "Parameter top_p must be in (0.0,1.0], got 2.0."),
    ({"samplingParams": {"temperature": {"value": float("nan")}}}, "the decode parameters are invalid: temperature"),
    ({"kvSource": "{"}, "the decode parameters are invalid: kvSource"),
    ({"e2eStartTime": 1}, "Engine callback timeout: server e2eTimeout"),
])  # fmt: skip
async def test_messages_that_cannot_be_used(pair, changes, error):
    fields = {"reqId": "2", "tokens": [1, 5], "firstToken": [2], "msgType": 8, **changes}
    with pytest.raises(PeerError) as caught:
        await pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, pb.DecodeParameters(**fields), {})
    assert caught.value.reason == error
    assert pair.decode.instance.decoding == set()
    assert pair.decode.serving.services.admission.in_flight == 0


async def test_a_request_is_taken_once(pair):
    gate = Gate()
    pair.decode.serving.worker.default = Script(tokens=ids(" Madrid is far"), gate_after=2, gate=gate)
    message = pb.DecodeParameters(reqId="2", tokens=[1, 5], firstToken=[7], msgType=8)
    await pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, message, {})
    with pytest.raises(PeerError, match="Runtime request has been used before"):
        await pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, message, {})
    assert list(pair.decode.instance.decoding) == ["2"]
    gate.open()
    assert [keyword for keyword, _ in await pair.read().until_last("2")] == ["lastData"]
    assert len(pair.decode.serving.worker.submits) == 1


async def test_a_request_is_taken_once_while_workers_restart(pair):
    """The second call comes while the first one waits for a worker."""
    serving = pair.decode.serving
    serving.router.hold_s = 60.0
    serving.worker.die()
    await eventually(lambda: not any(target.responsive for target in serving.router.targets))
    message = pb.DecodeParameters(reqId="2", tokens=[1, 5], firstToken=[7], msgType=8)
    calls = [
        asyncio.create_task(pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, message, {}))
        for _ in range(2)
    ]
    refused, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(PeerError, match="Runtime request has been used before"):
        refused.pop().result()
    await serving.worker.start()
    await asyncio.wait(calls)
    assert [keyword for keyword, _ in await pair.read().until_last("2")] == ["lastData"]
    assert len(serving.worker.submits) == 1
    await eventually(lambda: serving.services.admission.in_flight == 0)
    assert pair.decode.instance.decoding == set()


async def test_a_request_that_was_not_taken_may_come_again(pair):
    serving = pair.decode.serving
    message = pb.DecodeParameters(reqId="2", tokens=[1, 5], firstToken=[7], msgType=8, modelName="none")
    for _ in range(2):
        with pytest.raises(PeerError) as caught:
            await pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, message, {})
        assert "used before" not in caught.value.reason
    assert (pair.decode.instance.decoding, serving.services.admission.in_flight) == (set(), 0)


@pytest.mark.parametrize(
    ("address", "connection", "used"),
    [
        ("unix:/run/w.sock", "ipv4:127.0.0.1:5", True),
        ("unix:/run/w.sock", "ipv6:%5B::1%5D:5", True),
        ("unix:/run/w.sock", "ipv4:10.0.0.2:5", False),
        ("tcp://10.0.0.2:7400", "ipv4:10.0.0.2:5", True),
        ("tcp://10.0.0.2:7400", "ipv4:10.0.0.20:5", False),
        ("tcp://10.0.0.2:7400", "ipv4:127.0.0.1:5", False),
        ("tcp://[fd00::2]:7400", "ipv6:%5Bfd00::2%5D:5", True),
        ("tcp://[fd00::2]:7400", "ipv6:%5Bfd00::3%5D:5", False),
        ("nothing", "ipv4:127.0.0.1:5", False),
    ],
)
def test_blocks_are_fetched_from_the_callers_host_alone(address, connection, used):
    source = KvSource(address, "w", 1, "t", 32, 16)
    assert near(source, connection) is (source if used else None)
    assert near(None, connection) is None
