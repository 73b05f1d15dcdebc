"""The client against workers that are played by the test: deaths, silence, and a process that slept."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from engine import client as client_module
from engine import messages
from engine.casualties import MAX_DEATHS, Casualties
from engine.client import EngineClient, EngineDead
from engine.failures import Failure, FailureCode, FinishReason
from engine.kv_transfer.handle import KvSource
from engine.messages import PROTOCOL_VERSION, Hello, ModelInfo, Outputs, Ready, RequestOutput, Stats, Submit, frame
from engine.sampling.params import SamplingParams
from tests.waiting import eventually

INFO = ModelInfo("", "", "", "", "cpu", 8, 8, [], 16, 1, 1, 1, 0, {})


@asynccontextmanager
async def connected(tmp_path, on_submit=None, casualties=None, epoch=1):
    """A client of a worker that does `on_submit(message, writer)` with every request."""

    async def serve(reader, writer):
        try:
            while True:
                head = await reader.readexactly(4)
                message = messages.to_worker.decode(await reader.readexactly(messages.frame_length(head)))
                if isinstance(message, Hello):
                    writer.write(frame(Ready(PROTOCOL_VERSION, "w", epoch, INFO)))
                elif isinstance(message, Submit):
                    on_submit(message, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    path = str(tmp_path / f"{epoch}.sock")
    server = await asyncio.start_unix_server(serve, path)
    client = EngineClient(f"unix:{path}", "w", epoch, casualties)
    await client.connect()
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def die(message, writer):
    writer.close()


def answer(message, writer):
    writer.write(frame(Outputs([RequestOutput(message.request_id, [3], finish_reason=FinishReason.STOP)], Stats())))


async def ask(client, prompt, seed=0):
    return [output async for output in client.generate(prompt, SamplingParams(max_tokens=1, seed=seed))]


async def test_what_was_in_flight_at_two_deaths_is_refused_and_reaches_no_third_worker(tmp_path):
    casualties, reached = Casualties(), []
    for epoch in (1, 2):
        async with connected(tmp_path, die, casualties, epoch) as client:
            dead = await asyncio.gather(*(ask(client, [1, 2], seed) for seed in range(4)), return_exceptions=True)
            assert all(isinstance(error, EngineDead) for error in dead)

    def third(message, writer):
        reached.append(message.prompt_token_ids)
        answer(message, writer)

    async with connected(tmp_path, third, casualties, epoch=3) as client:
        (refused,) = await ask(client, [1, 2], seed=99)
        assert (refused.finish_reason, refused.error) == (FinishReason.ERROR, Failure(FailureCode.POISONOUS))
        assert (await ask(client, [1, 2, 3]))[0].token_ids == [3]
        assert reached == [[1, 2, 3]]


async def test_who_had_run_for_a_while_is_not_refused_with_a_poisonous_request(tmp_path):
    """Both are in flight at both deaths, and neither gets further the second time; the other one had brought tokens before."""
    casualties, poison = Casualties(), [6, 6, 6]

    def first(message, writer):
        if message.prompt_token_ids == poison:
            writer.close()
        else:
            writer.write(frame(Outputs([RequestOutput(message.request_id, [7])], Stats())))

    waiting = []

    def second(message, writer):
        waiting.append(message)
        if len(waiting) == 2:
            writer.close()

    async def both(client, generated, begins):
        story = asyncio.ensure_future(replay(client, generated))
        await eventually(lambda: [each.begun for each in client._collectors.values()] == [begins])
        return await asyncio.gather(story, ask(client, poison), return_exceptions=True)

    async with connected(tmp_path, first, casualties, epoch=1) as client:
        assert all(isinstance(error, EngineDead) for error in await both(client, [], begins=True))
    async with connected(tmp_path, second, casualties, epoch=2) as client:
        assert all(isinstance(error, EngineDead) for error in await both(client, [7], begins=False))
    async with connected(tmp_path, answer, casualties, epoch=3) as client:
        (refused,) = await ask(client, poison)
        assert refused.error == Failure(FailureCode.POISONOUS)
        assert (await replay(client, [7]))[0].token_ids == [3]


async def test_one_death_counts_once_for_all_that_are_equal(tmp_path):
    casualties = Casualties()
    async with connected(tmp_path, die, casualties) as client:
        await asyncio.gather(*(ask(client, [1], seed) for seed in range(8)), return_exceptions=True)
    async with connected(tmp_path, answer, casualties, epoch=2) as client:
        assert (await ask(client, [1]))[0].token_ids == [3]


async def test_what_ended_well_was_not_the_cause(tmp_path):
    casualties = Casualties()
    for epoch, does in ((1, die), (2, answer), (3, die), (4, answer)):
        async with connected(tmp_path, does, casualties, epoch) as client:
            (result,) = await asyncio.gather(ask(client, [1]), return_exceptions=True)
    assert result[0].token_ids == [3]


@pytest.mark.parametrize("code", [FailureCode.OVERLOADED, FailureCode.STEP_FAILED])
async def test_a_refusal_absolves_nobody(tmp_path, code):
    """It comes most often after a death, when others have more to do."""

    def refuse(message, writer):
        refused = RequestOutput(message.request_id, finish_reason=FinishReason.ERROR, error=Failure(code))
        writer.write(frame(Outputs([refused], Stats())))

    casualties = Casualties()
    for epoch, does in enumerate([die, refuse, die], 1):
        async with connected(tmp_path, does, casualties, epoch) as client:
            await asyncio.gather(ask(client, [1]), return_exceptions=True)
    async with connected(tmp_path, answer, casualties, epoch=4) as client:
        assert (await ask(client, [1]))[0].error == Failure(FailureCode.POISONOUS)


async def test_hanging_up_is_no_death(tmp_path):
    casualties = Casualties()
    for epoch in (1, 2):
        arrived = asyncio.Event()
        async with connected(tmp_path, lambda *_, seen=arrived: seen.set(), casualties, epoch) as client:
            waiting = asyncio.ensure_future(ask(client, [1]))
            await arrived.wait()
            await client.close()
            with pytest.raises(EngineDead):
                await waiting
    async with connected(tmp_path, answer, casualties, epoch=3) as client:
        assert (await ask(client, [1]))[0].token_ids == [3]


async def test_a_connection_that_is_given_up_before_the_greeting_is_closed(tmp_path):
    greeted, closed = asyncio.Event(), asyncio.Event()

    async def listen(reader, writer):
        await reader.readexactly(4)
        greeted.set()
        await reader.read()
        closed.set()
        writer.close()

    path = str(tmp_path / "w.sock")
    server = await asyncio.start_unix_server(listen, path)
    connecting = asyncio.create_task(EngineClient(f"unix:{path}", "w", 1).connect())
    await greeted.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    async with asyncio.timeout(60):
        await closed.wait()
    server.close()
    await server.wait_closed()


async def test_a_close_that_is_cancelled_leaves_no_connection_open(tmp_path):
    ended = asyncio.Event()

    async def listen(reader, writer):
        writer.write(frame(Ready(PROTOCOL_VERSION, "w", 1, INFO)))
        await reader.read()
        ended.set()
        writer.close()

    path = str(tmp_path / "w.sock")
    server = await asyncio.start_unix_server(listen, path)
    client = EngineClient(f"unix:{path}", "w", 1)
    await client.connect()
    closing = asyncio.gather(client.close())
    closing.cancel()  # before it began, as when a server stops just then
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(60):
        await ended.wait()
    server.close()
    await server.wait_closed()


async def test_a_silent_worker_becomes_suspect_and_then_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "TICK_S", 0.01)
    monkeypatch.setattr(client_module, "SUSPECT_AFTER_S", 0.05)
    monkeypatch.setattr(client_module, "DEAD_AFTER_S", 0.1)
    async with connected(tmp_path, lambda *_: None) as client:
        assert not client.suspect
        with pytest.raises(EngineDead, match="no heartbeat"):
            await ask(client, [1])
        assert client.suspect


async def test_a_process_that_slept_takes_nobody_for_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "TICK_S", 0.05)
    monkeypatch.setattr(client_module, "SUSPECT_AFTER_S", 0.2)
    monkeypatch.setattr(client_module, "DEAD_AFTER_S", 0.4)
    async with connected(tmp_path, answer) as client:
        time.sleep(1.0)  # noqa: ASYNC251  # the whole loop stands still, as when the process is stopped
        assert (await ask(client, [1]))[0].token_ids == [3]
        assert not client.suspect


async def test_a_request_of_a_dead_worker_may_be_stopped(tmp_path):
    """Between the death and the moment in which its reader hears of it."""
    async with connected(tmp_path, lambda *_: None) as client:
        outputs = client.generate([1], SamplingParams(max_tokens=1), request_id=7)
        reading = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        client._fail("it died")
        client.stop(7)
        with pytest.raises(EngineDead):
            await reading


def move(message, writer):
    moved = RequestOutput(message.request_id, finish_reason=FinishReason.MOVED)
    writer.write(frame(Outputs([moved], Stats())))


async def replay(client, generated, **how):
    outputs = client.generate([1, 2], SamplingParams(max_tokens=9), generated=generated, **how)
    return [output async for output in outputs]


async def test_a_replay_counts_as_the_request_that_it_continues(tmp_path):
    """A request that dies, is moved, and dies again where it died has met two deaths."""
    casualties = Casualties()
    for epoch, end in enumerate([die, move, die], 1):
        async with connected(tmp_path, end, casualties, epoch=epoch) as client:
            if end is move:
                assert (await replay(client, [5]))[-1].finish_reason is FinishReason.MOVED
                assert client.draining
            else:
                with pytest.raises(EngineDead):
                    await replay(client, [5])
    async with connected(tmp_path, move, casualties, epoch=4) as client:
        (refused,) = await replay(client, [5])
        assert refused.error == Failure(FailureCode.POISONOUS)


async def test_a_prefill_that_loses_its_blocks_is_no_sign_of_draining(tmp_path):
    async with connected(tmp_path, move) as client:
        assert (await replay(client, [], hold="t"))[-1].finish_reason is FinishReason.MOVED
        assert not client.draining


def held(epoch):
    return {"hold": f"t{epoch}"}


def fetched(epoch):
    return {"source": KvSource("unix:/prefill.sock", "prefill", epoch, f"t{epoch}", 2, 16)}


@pytest.mark.parametrize(
    "varied", [held, fetched, lambda epoch: {"priority": epoch}], ids=["prefill", "decode", "priority"]
)
async def test_neither_priority_nor_where_its_blocks_are_makes_another_request(tmp_path, varied):
    casualties = Casualties()
    for epoch in (1, 2):
        async with connected(tmp_path, die, casualties, epoch=epoch) as client:
            with pytest.raises(EngineDead):
                await replay(client, [5], **varied(epoch))
    async with connected(tmp_path, answer, casualties, epoch=3) as client:
        (refused,) = await replay(client, [5], **varied(3))
        assert refused.error == Failure(FailureCode.POISONOUS)


async def test_a_prefill_that_ends_well_does_not_absolve_its_decode(tmp_path):
    casualties = Casualties()

    def prefill(message, writer):
        moved = RequestOutput(message.request_id, finish_reason=FinishReason.MOVED, **fetched(1))
        writer.write(frame(Outputs([moved], Stats())))

    for epoch, does in enumerate([prefill, die, prefill, die], 1):
        async with connected(tmp_path, does, casualties, epoch=epoch) as client:
            if does is prefill:
                assert (await replay(client, [5], **held(epoch)))[-1].finish_reason is FinishReason.MOVED
            else:
                with pytest.raises(EngineDead):
                    await replay(client, [5], **fetched(epoch))
    async with connected(tmp_path, answer, casualties, epoch=9) as client:
        (refused,) = await replay(client, [5], **held(9))
        assert refused.error == Failure(FailureCode.POISONOUS)


async def test_a_request_that_gets_further_each_time_was_there_by_chance(tmp_path):
    """Up to a number of deaths that chance does not explain. Equal requests count as the one that got furthest."""
    casualties = Casualties()

    def generate_and_die(message, writer):
        writer.write(frame(Outputs([RequestOutput(message.request_id, [7])], Stats())))
        writer.close()

    for epoch in range(1, MAX_DEATHS + 1):
        async with connected(tmp_path, generate_and_die, casualties, epoch=epoch) as client:
            both = await asyncio.gather(*(replay(client, [5] * n) for n in (0, epoch)), return_exceptions=True)
            assert all(isinstance(error, EngineDead) for error in both), epoch
    async with connected(tmp_path, move, casualties, epoch=99) as client:
        (refused,) = await replay(client, [5] * 9)
        assert refused.error == Failure(FailureCode.POISONOUS)
