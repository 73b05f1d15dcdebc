"""What one gRPC client may send, hold and leave unread."""

from __future__ import annotations

import contextlib
import json
import threading

import grpc
import psutil
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import calls
from tests.live import LiveServer, wait_until

SERVICE = "/inference.GRPCInferenceService/"
PLACES = 8
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
]
LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 2.0}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    environment = {
        "DRAGOMAN_MAX_CONCURRENT_REQUESTS": str(PLACES),
        "DRAGOMAN_SLOW_CLIENT_TIMEOUT_S": "5",
        "DRAGOMAN_BODY_TIMEOUT_S": "2",
        "DRAGOMAN_SPECULATIVE_TOKENS": "0",
    }
    live = LiveServer(tmp_path_factory.mktemp("grpc") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0, live.log


def channel_to(server, options=()):
    return grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=[*SMALL_WINDOW, *options])


def unary(channel, method, answer=pb.ModelInferResponse):
    return channel.unary_unary(SERVICE + method, lambda m: m.SerializeToString(), answer.FromString)


def asking(stream=True, **parameters):
    request = pb.ModelInferRequest(model_name="demo")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"Once upon a time")
    flag = request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    flag.contents.bool_contents.append(stream)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def places_taken(server):
    return calls.get(f"{server.url}/load", timeout=60).json()["server_load"]


class Stream:
    """One ModelStreamInfer whose requests are sent and whose answers wait."""

    def __init__(self, channel, requests):
        self._end = threading.Event()
        send = channel.stream_stream(
            SERVICE + "ModelStreamInfer", lambda m: m.SerializeToString(), pb.ModelStreamInferResponse.FromString
        )
        self.answers = send(self._all(requests))

    def _all(self, requests):
        yield from requests
        self._end.wait()

    def close(self):
        self.answers.cancel()
        self._end.set()


def test_a_client_that_does_not_read_loses_its_call_and_nobody_else_anything(strict):
    with channel_to(strict) as channel:
        stream = Stream(channel, [asking(**LONG, seed=seed) for seed in range(2 * PLACES)])
        try:
            wait_until(lambda: places_taken(strict) == PLACES * 3 // 4)
            # its share of the places is full, and other clients have theirs
            assert strict.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
            with channel_to(strict) as other:
                answer = unary(other, "ModelInfer")(asking(stream=False, max_tokens=2), timeout=60)
                assert answer.outputs[0].name == "text_output"
            wait_until(lambda: "client stopped reading; call ended" in strict.log, 60, lambda: strict.log)
            strict.wait_idle()
            with pytest.raises(grpc.RpcError) as told:
                for _ in stream.answers:
                    pass
            assert told.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            stream.close()


def test_refusals_say_when_to_try_again(strict):
    with channel_to(strict) as first, channel_to(strict) as second:
        streams = [Stream(c, [asking(**LONG, seed=s) for s in range(PLACES)]) for c in (first, second)]
        try:
            wait_until(lambda: places_taken(strict) == PLACES)
            with pytest.raises(grpc.RpcError) as refused:
                unary(first, "ModelInfer")(asking(stream=False, max_tokens=2), timeout=60)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            trailers = dict(refused.value.trailing_metadata())
            assert (trailers["retry-after"], trailers["retry-after-ms"]) == ("1", "1000")
        finally:
            for stream in streams:
                stream.close()
    strict.wait_idle()


def test_a_message_that_does_not_come_is_not_waited_for(strict):
    never = threading.Event()

    def nothing():
        never.wait()
        yield pb.ModelInferRequest()

    with channel_to(strict) as channel:
        ask = channel.stream_unary(SERVICE + "ModelInfer", lambda m: m.SerializeToString())
        with pytest.raises(grpc.RpcError) as late:
            ask(nothing(), timeout=60)
        never.set()
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the message took too long" in late.value.details()
    wait_until(lambda: places_taken(strict) == 0)


def test_messages_over_the_limit_are_refused_unread(strict):
    process = psutil.Process(strict.process.pid)
    request = asking(stream=False, max_tokens=1)
    request.inputs[0].contents.bytes_contents[0] = b"a" * (60 << 20)
    data = request.SerializeToString()
    before = process.memory_info().rss
    with channel_to(strict, [("grpc.max_send_message_length", -1)]) as channel:
        ask = channel.unary_unary(SERVICE + "ModelInfer")
        calls = [ask.future(data, timeout=60) for _ in range(4)]
        assert {call.code() for call in calls} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert process.memory_info().rss - before < 40 << 20
    assert strict.healthy()


def test_what_is_no_message_is_told_without_our_classes(strict):
    with channel_to(strict) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "ModelInfer")(b"\xff" * 30, timeout=60)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the message is no inference.ModelInferRequest"


def test_the_key_is_asked_for_before_the_message(tmp_path):
    environment = {"DRAGOMAN_REQUIRE_API_KEY": "true", "DRAGOMAN_GRPC_MAX_CONNECTIONS": "2"}
    live = LiveServer(tmp_path / "var", environment=environment)
    live.start()
    never = threading.Event()

    def nothing():
        never.wait()
        yield b""

    try:
        for method in ("ModelInfer", "ModelStreamInfer", "RepositoryIndex", "RepositoryModelLoad", "ModelStatistics"):
            with channel_to(live) as channel, pytest.raises(grpc.RpcError) as refused:  # which sends no message
                list(channel.stream_stream(SERVICE + method)(nothing(), timeout=60))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, method
        with channel_to(live) as first, channel_to(live) as second, channel_to(live) as third:
            for channel in (first, second):
                assert unary(channel, "ServerLive", pb.ServerLiveResponse)(pb.ServerLiveRequest(), timeout=60).live
            with pytest.raises(grpc.RpcError) as refused:
                unary(third, "ServerLive", pb.ServerLiveResponse)(pb.ServerLiveRequest(), timeout=5)
            assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    finally:
        never.set()
        assert live.stop() == 0, live.log
    assert json.dumps(live.log).count("Traceback") == 0


def test_calls_without_a_message_keep_nobody_from_the_health_checks(server):
    """Each connection has a share of its own of what needs no key."""
    never = threading.Event()

    def nothing():
        never.wait()
        yield b""

    health, address = "/grpc.health.v1.Health/Check", f"127.0.0.1:{server.torchserve_inference_port}"
    own = [("grpc.use_local_subchannel_pool", 1)]  # else all channels are one connection
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(grpc.insecure_channel(address, options=own)) for _ in range(5)]
        stack.callback(never.set)
        waiting = [channel.stream_unary(health).future(nothing(), timeout=60) for channel in many for _ in range(16)]
        refused = many[0].unary_unary(health).future(b"", timeout=60)
        with grpc.insecure_channel(address, options=own) as other:
            assert other.unary_unary(health)(b"", timeout=60) == b"\x08\x01"  # SERVING
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert not any(call.done() for call in waiting)
