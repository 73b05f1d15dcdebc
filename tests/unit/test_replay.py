"""Nothing is lost when a worker dies or hands over: a sequence goes on at another worker, and its client sees a pause."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from management.snapshot import Availability
from tests.unit.fake_worker import FakeWorker, settle
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually

PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The capital", "temperature": 0, "logprobs": 2}
STREAM = {**ASK, "stream": True}
TEXT = " of Spain is Madrid, and that of France is Paris."
TOKENS = [*ids(TEXT), 2]
LAST = len(TOKENS) - 1
DIED = "The worker that served this request died."


def text_of(answer):
    """Text, tokens and log-probabilities of a stream, and how it ended."""
    choices = [event["choices"][0] for event in answer.events[:-1]]
    assert answer.events[-1] == "[DONE]"
    parts = [(choice["text"], choice["logprobs"]) for choice in choices]
    tokens = [
        (token, value, top)
        for _, logprobs in parts
        if logprobs
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    ]
    return "".join(text for text, _ in parts), tokens, choices[-1]["finish_reason"]


def dies_after(*counts: int, text: str = TEXT) -> list[Script]:
    """One script for each worker: it dies after so many tokens."""
    return [Script(tokens=[*ids(text), 2], die_after=count) for count in counts]


def give(serving, *scripts: Script) -> None:
    """One for each worker; the rest of them say all."""
    for worker in serving.workers:
        worker.default = says(TEXT)
    for worker, script in zip(serving.workers, scripts, strict=False):
        worker.default = script


async def undisturbed(start, body):
    serving = await start(1)
    give(serving)
    answer = await serving.post(PATH, body)
    await serving.stop()
    return answer


@pytest.mark.parametrize("count", range(LAST + 1))
async def test_a_death_at_each_token(start, count):
    serving = await start(2)
    give(serving, *dies_after(count))
    answer = await serving.post(PATH, STREAM)
    text, tokens, reason = text_of(answer)
    assert (text, reason) == (TEXT, "stop")
    assert [value for _, value, _ in tokens] == [-(n + 1) / 8 for n in range(len(tokens))]
    first, second = (worker.submits[0] for worker in serving.workers)
    assert (first.generated, second.generated) == ([], TOKENS[:count])
    assert (first.prompt_token_ids, first.params) == (second.prompt_token_ids, second.params)
    assert second.timeout_s <= first.timeout_s


@pytest.mark.parametrize("cut", [0, 1, 4])
@pytest.mark.parametrize(
    ("path", "body", "plane"),
    [
        (PATH, ASK, "front"),
        (PATH, {**STREAM, "stream_options": {"include_usage": True}}, "front"),
        (PATH, {**ASK, "stop": [" is Paris"], "echo": True}, "front"),
        (PATH, {**STREAM, "stop": ["France"], "min_tokens": 3}, "front"),
        (PATH, {**ASK, "prompt_logprobs": 1}, "front"),
        (PATH, {**ASK, "ignore_eos": True, "max_tokens": 9}, "front"),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Where?"}], "logprobs": True, "top_logprobs": 1, "stream": True}, "front"),
        ("/generate_stream", {"inputs": "The capital", "parameters": {"details": True, "top_n_tokens": 2}}, "front"),
        ("/generate", {"inputs": "The capital", "parameters": {"details": True, "decoder_input_details": True}}, "front"),
        ("/v2/models/demo/generate_stream", {"text_input": "The capital", "stream": True}, "front"),
        ("/v2/models/demo/generate", {"text_input": "The capital", "parameters": {"details": True}}, "mindie"),
        ("/infer", {"inputs": "The capital", "stream": True}, "mindie"),
    ],
)  # fmt: skip
async def test_every_dialect_answers_as_if_nothing_had_happened(start, cut, path, body, plane):
    def stable(answer):
        """Without ids, and without what is a time."""
        varying = (
            "id",
            "created",
            "request_id",
            "prefill_time",
            "decode_time",
            "decode_time_arr",
            "seed",
            "queue_wait_time",
        )

        def cleaned(value):
            if isinstance(value, dict):
                return {k: cleaned(v) for k, v in value.items() if k not in varying}
            return [cleaned(v) for v in value] if isinstance(value, list) else value

        if answer.text.startswith(("{", "[")):
            return cleaned(answer.json())
        return [event if event == "[DONE]" else cleaned(event) for event in answer.events]

    quiet = await start(1)
    give(quiet)
    expected = await quiet.post(path, body, plane=plane)
    assert expected.status == 200, expected.text
    await quiet.stop()
    serving = await start(2)
    give(serving, *dies_after(cut))
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == 200
    assert serving.workers[1].submits
    assert stable(answer) == stable(expected)


async def test_what_met_two_deaths_ends_with_its_error(start):
    serving = await start(3)
    give(serving, *dies_after(2, 2))
    answer = await serving.post(PATH, STREAM)
    shown = "".join(e["choices"][0]["text"] for e in answer.events if isinstance(e, dict) and "choices" in e)
    assert TEXT.startswith(shown)
    assert "workers died twice" in answer.events[-2]["error"]["message"]
    assert serving.workers[1].submits[0].generated == TOKENS[:2]
    assert not serving.workers[2].submits


async def test_what_gets_further_at_each_death_goes_on(start):
    """Workers die at random; nobody's request is to blame."""
    serving = await start(3)
    give(serving, *dies_after(2, 5))
    answer = await serving.post(PATH, STREAM)
    assert "".join(e["choices"][0]["text"] for e in answer.events if e != "[DONE]") == TEXT
    assert serving.workers[2].submits[0].generated == TOKENS[:5]


async def test_a_move_in_between_does_not_clear_a_request_of_deaths(start):
    """Death, move, death: no third worker dies of it."""
    serving = await start(4)
    gate = Gate()
    give(serving, *dies_after(2), Script(tokens=TOKENS, gate_after=2, gate=gate), *dies_after(2))
    call = serving.begin(PATH, STREAM)
    await gate.reached.wait()
    serving.workers[1].hand_over()
    answer = await call.end()
    assert "workers died twice" in answer.events[-2]["error"]["message"]
    assert not serving.workers[3].submits


async def test_deaths_that_were_ordered_are_no_casualties_but_have_a_limit(start):
    """A draining worker that is killed is not the request's doing. Four of them are enough all the same."""
    serving = await start(5)
    gates = [Gate() for _ in range(4)]
    give(serving, *(Script(tokens=TOKENS, gate_after=n + 2, gate=gate) for n, gate in enumerate(gates)))
    call = serving.begin(PATH, STREAM)
    for worker, gate in zip(serving.workers[:4], gates, strict=True):
        await gate.reached.wait()
        worker.drain()
        await eventually(lambda worker=worker: worker_of(serving, worker).draining)
        worker.die()
    answer = await call.end()
    assert answer.events[-2]["error"]["message"] == DIED
    assert not serving.workers[4].submits


def worker_of(serving, worker):
    """The client of a worker."""
    return next(c for t in serving.router.targets for w, c in t.clients.items() if w.worker_id == worker.worker_id)


async def test_no_worker_for_a_while(start, sockets):
    serving = await start(1, replay_wait_s=600)
    give(serving, *dies_after(3))
    call = serving.begin(PATH, STREAM)
    await eventually(lambda: not serving.router.ready)
    await settle()
    assert not call.task.done()
    again = FakeWorker(sockets / "again.sock", "demo/0", epoch=2)
    again.default = says(TEXT)
    serving.workers.append(await again.start())
    serving.publish([again])
    assert text_of(await call.end())[0] == TEXT
    assert again.submits[0].generated == TOKENS[:3]


async def test_a_queued_request_waits_as_well(start, sockets):
    serving = await start(1, replay_wait_s=600)
    give(serving, *dies_after(0))
    call = serving.begin(PATH, ASK)
    await eventually(lambda: not serving.router.ready)
    again = FakeWorker(sockets / "again.sock", "demo/0", epoch=2)
    again.default = says(TEXT)
    serving.workers.append(await again.start())
    serving.publish([again])
    assert (await call.end()).json()["choices"][0]["text"] == TEXT


async def test_no_worker_at_all(start):
    serving = await start(1, replay_wait_s=0.01)
    give(serving, *dies_after(3))
    with capture_logs() as logs:
        answer = await serving.post(PATH, STREAM)
    assert answer.events[-2]["error"]["message"] == DIED
    (line,) = [line for line in logs if line["event"] == "generation"]
    assert (line["cause"], "replays" in line) == ("worker_lost", False)


@pytest.mark.parametrize("count", [0, 3])
async def test_the_deployments_failure_ends_the_wait(start, count):
    serving = await start(1, replay_wait_s=600)
    give(serving, *dies_after(count))
    call = serving.begin(PATH, STREAM)
    await eventually(lambda: not serving.router.ready)
    serving.availability = Availability.FAILED
    serving.publish([])
    answer = await call.end()
    assert answer.events[-2]["error"]["message"] == DIED if count else answer.status == 503


async def test_a_request_is_told_that_its_deployment_is_too_dear(start):
    serving = await start(1)
    serving.availability = Availability.TOO_DEAR
    serving.publish([])
    await eventually(lambda: not serving.router.ready)
    answer = await serving.post(PATH, ASK)
    assert answer.status == 503
    assert "max_price_per_hour" in answer.json()["error"]["message"]


async def test_the_deadline_ends_the_wait(start):
    serving = await start(1, request_timeout_s=0.2, replay_wait_s=600)
    give(serving, *dies_after(3))
    answer = await serving.post(PATH, STREAM)
    assert "deadline" in answer.events[-2]["error"]["message"]


async def test_the_servers_end_ends_the_wait(start):
    serving = await start(1, replay_wait_s=600)
    give(serving, *dies_after(3))
    call = serving.begin(PATH, STREAM)
    await eventually(lambda: not serving.router.ready)
    await serving.router.stop()
    answer = await call.end()
    assert answer.events[-2]["error"]["message"] == "The server is shutting down."


async def test_a_client_may_stop_or_leave_while_its_request_waits(start):
    serving = await start(1, replay_wait_s=600)
    body = {"id": "mine", "text_input": "The capital", "parameters": {"max_new_tokens": 40}}
    give(serving, *dies_after(3))
    stopped = serving.begin("/v2/models/demo/generate", body, plane="mindie")
    left = serving.begin(PATH, STREAM)
    await eventually(lambda: len(serving.worker.submits) == 2)
    await eventually(lambda: not serving.router.ready)
    left.hang_up()
    await left.task
    assert (await serving.post("/v2/models/demo/stopInfer", {"id": "mine"}, plane="mindie")).status == 200
    answer = await stopped.end()
    assert answer.status == 200
    assert TEXT.startswith(answer.json()["text_output"])
    assert answer.json()["text_output"]
    assert serving.services.admission.in_flight == 0


@pytest.mark.parametrize("count", [0, 1, 5, LAST])
async def test_sequences_that_are_handed_over(start, count):
    serving = await start(2)
    gate = Gate()
    give(serving, Script(tokens=TOKENS, gate_after=count, gate=gate))
    call = serving.begin(PATH, STREAM)
    await gate.reached.wait()
    with capture_logs() as logs:
        serving.workers[0].hand_over()
        answer = await call.end()
    assert text_of(answer)[0] == TEXT
    assert serving.workers[1].submits[0].generated == TOKENS[:count]
    (line,) = [line for line in logs if line["event"] == "generation"]
    assert line["replays"] == 1
    page = (await serving.get("/metrics")).text
    assert 'dragoman_replays_total{cause="moved"} 1.0' in page
    assert 'dragoman_replays_total{cause="worker_died"} 0.0' in page


async def test_moves_do_not_count_as_deaths(start):
    """Four moves and a death."""
    serving = await start(6)
    gates = [Gate() for _ in range(4)]
    moving = [Script(tokens=TOKENS, gate_after=n + 1, gate=gate) for n, gate in enumerate(gates)]
    give(serving, *moving, *dies_after(6))
    call = serving.begin(PATH, STREAM)
    for worker, gate in zip(serving.workers, gates, strict=False):
        await gate.reached.wait()
        worker.hand_over()
    answer = await call.end()
    assert text_of(answer)[0] == TEXT
    page = (await serving.get("/metrics")).text
    assert 'dragoman_replays_total{cause="moved"} 4.0' in page
    assert 'dragoman_replays_total{cause="worker_died"} 1.0' in page


async def test_a_replay_that_meets_a_draining_worker_goes_on_at_the_next(start):
    serving = await start(3)
    give(serving, *dies_after(3))
    serving.workers[1].draining = True  # unheard
    assert text_of(await serving.post(PATH, STREAM))[0] == TEXT
    assert [len(w.submits) for w in serving.workers] == [1, 1, 1]
    assert serving.workers[2].submits[0].generated == TOKENS[:3]


async def test_a_reader_that_lags_gets_everything(start):
    """The tokens and the end lie in one output when the client reads again."""
    serving = await start(2)
    long = [*ids(" of Spain") * 300, 2]
    gate = Gate()
    serving.workers[0].default = Script(tokens=long, gate_after=400, gate=gate)
    serving.workers[1].default = Script(tokens=long)
    call = serving.begin(PATH, {**STREAM, "max_tokens": 1000})
    await call.chunks(1)
    call.read_no_more()
    await gate.reached.wait()
    serving.workers[0].hand_over()
    await settle()
    call.read_on()
    assert text_of(await call.end())[0] == " of Spain" * 300
    assert serving.workers[1].submits[0].generated == long[:400]


async def test_three_sequences_of_one_request(start, sockets):
    """Each goes on with its own tokens and its own seed."""
    texts = [" of Spain is Madrid", " of France is Paris", " of Italy is Rome"]
    serving = await start(1, replay_wait_s=600)
    gate = Gate()
    for count, text in enumerate(texts, 1):
        serving.worker.scripts.append(Script(tokens=[*ids(text), 2], gate_after=count, gate=gate))
    call = serving.begin(PATH, {**STREAM, "n": 3, "temperature": 1, "seed": 5})
    await eventually(lambda: serving.worker.stats.generation_tokens == 1 + 2 + 3)
    seeds = [submit.params.seed for submit in serving.worker.submits]
    serving.worker.die()
    again = FakeWorker(sockets / "again.sock", "demo/0", epoch=2)
    again.by_seed = {seed: says(text) for seed, text in zip(seeds, texts, strict=True)}
    serving.workers.append(await again.start())
    serving.publish([again])
    answer = await call.end()
    got = {seed: "" for seed in seeds}
    for event in answer.events[:-1]:
        got[5 + event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert got == dict(zip(seeds, texts, strict=True))
    generated = {submit.params.seed: submit.generated for submit in again.submits}
    assert generated == {seed: ids(text)[:n] for n, (seed, text) in enumerate(zip(seeds, texts, strict=True), 1)}


async def test_prompt_logprobs_come_once(start):
    """Those that were complete are kept; those of a worker that died before the first token are dropped."""
    body = {**ASK, "prompt_logprobs": 1}
    expected = await undisturbed(start, body)
    for count in (0, 2):
        serving = await start(2)
        give(serving, *dies_after(count))
        answer = await serving.post(PATH, body)
        first, second = answer.json()["choices"][0], expected.json()["choices"][0]
        assert first["prompt_logprobs"] == second["prompt_logprobs"]
        await serving.stop()


async def test_the_log_has_the_cached_tokens_of_the_first_worker(start):
    serving = await start(2)
    give(serving, Script(tokens=TOKENS, die_after=3, cached_tokens=2), says(TEXT, cached_tokens=1))
    with capture_logs() as logs:
        await serving.post(PATH, ASK)
    (line,) = [line for line in logs if line["event"] == "generation"]
    assert (line["cached_tokens"], line["completion_tokens"], line["replays"]) == (2, len(TOKENS), 1)


async def test_beams_repeat_the_step_that_was_lost(start):
    body = {
        "model": "demo",
        "prompt": "The capital",
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 4,
        "temperature": 0,
    }
    expected = await (await start(1)).post(PATH, body)
    assert expected.status == 200
    for script in (Script(die_after=2), Script(tokens=[5, 5, 5], gate_after=2, gate=Gate())):
        serving = await start(2)
        first = serving.workers[0]
        first.scripts.extend([Script(), Script(), script])
        call = serving.begin(PATH, body)
        if script.die_after is None:
            await script.gate.reached.wait()
            first.hand_over()
        answer = await call.end()
        assert json.dumps(answer.json()["choices"]) == json.dumps(expected.json()["choices"])
        assert serving.workers[1].submits
        await serving.stop()
