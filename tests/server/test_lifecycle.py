"""Start, drain, crash, recover: what happens to requests when processes come and go."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.live import LiveServer, events, wait_until
from tests.management.admin_login import log_in

STORY = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture
def live(tmp_path):
    server = LiveServer(
        tmp_path / "var", environment={"DRAGOMAN_DRAIN_S": "60", "DRAGOMAN_REPLAY_WAIT_S": "90"}
    ).start()
    yield server
    if server.process.poll() is None:
        server.stop(signal.SIGKILL)


def in_background(server, body, results):
    def run():
        results.append(server.post("/v1/completions", body))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_sigterm_lets_streams_finish_and_leaves_no_process(live):
    results: list[httpx.Response] = []
    threads = [in_background(live, {**STORY, "max_tokens": 1500}, results) for _ in range(4)]
    wait_until(lambda: live.metric("vllm:num_requests_running") == 4)
    children = psutil.Process(live.process.pid).children(recursive=True)
    assert live.stop() == 0
    for thread in threads:
        thread.join()
    for answer in results:
        *chunks, done = events(answer)
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(child.is_running() for child in children)


def test_streams_that_outlast_the_drain_end_with_an_error(tmp_path):
    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_DRAIN_S": "0.3"}).start()
    results: list[httpx.Response] = []
    bodies = [{**STORY, "max_tokens": 1900, "n": 1} for _ in range(16)]
    threads = [in_background(live, body, results) for body in bodies]
    wait_until(lambda: live.metric("vllm:num_requests_running") == 16)
    begin = time.monotonic()
    assert live.stop() == 0
    assert time.monotonic() - begin < 60
    for thread in threads:
        thread.join()
    for answer in results:
        *_, error, done = events(answer)
        assert done == "[DONE]"
        assert error["error"]["message"] == "The server is shutting down."


def test_refused_while_draining(live):
    results: list[httpx.Response] = []
    # At this temperature few drafts are right, so that it outlasts the calls beside it.
    thread = in_background(live, {**STORY, "max_tokens": 1900, "n": 4, "temperature": 2.0}, results)
    wait_until(lambda: live.metric("vllm:num_requests_running") > 0)
    with httpx.Client(base_url=live.url) as kept:  # a kept connection outlives the listener
        assert kept.get("/health").status_code == 200
        live.process.send_signal(signal.SIGTERM)
        wait_until(lambda: kept.get("/health").status_code == 503)
        answer = kept.post("/v1/completions", content=json.dumps({"prompt": "x"}))
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        tgi = kept.post("/generate", content=json.dumps({"inputs": "x"}))
        assert (tgi.status_code, tgi.json()["error_type"]) == (429, "overloaded")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", live.front_port), timeout=2)
    assert live.stop() == 0
    thread.join()
    assert events(results[0])[-1] == "[DONE]"


def test_a_killed_worker_is_replaced_and_its_requests_go_on(live):
    body = {**STORY, "max_tokens": 1900}
    undisturbed = events(live.post("/v1/completions", body))
    results: list[httpx.Response] = []
    before = live.metric("vllm:generation_tokens_total")
    thread = in_background(live, body, results)
    wait_until(lambda: live.metric("vllm:generation_tokens_total") > before)  # the stream has begun
    (worker,) = live.workers()
    worker.kill()
    wait_until(lambda: not live.healthy())
    assert (
        live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    )  # it waits for the next one
    live.wait_ready()
    assert live.workers()[0].pid != worker.pid
    thread.join(60)
    assert text_of(events(results[0])) == text_of(undisturbed)
    assert live.metric("dragoman_replays_total", cause="worker_died") == 1


def text_of(stream):
    """The text of a complete stream."""
    *chunks, done = stream
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_stopped_worker_is_noticed_killed_and_replaced(live):
    (worker,) = live.workers()
    worker.suspend()
    wait_until(lambda: not live.healthy())
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    live.wait_ready()


def test_workers_die_with_a_killed_server(live):
    (worker,) = live.workers()
    live.process.kill()
    live.process.wait()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_a_second_start_is_quick_and_a_taken_port_is_told(live):
    again = LiveServer(live.data_dir.parent / "other", front_port=live.front_port).start(wait=False)
    assert again.process.wait(60) == 1
    assert "error:" in again.log
    assert str(live.front_port) in again.log
    assert live.stop(signal.SIGINT) == 0
    begin = time.monotonic()
    live.start()
    assert time.monotonic() - begin < 120  # the figure itself is a benchmark's business
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


def read_on(page):
    while True:
        page.recv(timeout=60)


def test_an_open_page_of_the_admin_holds_up_no_shutdown(tmp_path):
    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_DRAIN_S": "100000"}).start()
    address = f"{live.admin_url.replace('http', 'ws')}/ws/status"
    with contextlib.closing(log_in(live.admin_url, live.data_dir)) as browser:
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        with connect(address, origin=live.admin_url, additional_headers={"cookie": cookie}) as page:
            assert "deployments" in page.recv(timeout=60)
            live.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                read_on(page)
            assert closed.value.rcvd.code == 1000
    assert live.stop() == 0, live.log
