"""Requests wait for a deployment's first worker: bounded, fair between keys, and gone with their clients."""

from __future__ import annotations

import asyncio

import pytest

from inference.errors import Overloaded, Starting, TooLate, Unavailable
from inference.workers.holding import HoldQueue
from management.snapshot import Availability, Snapshot
from tests.unit.serving import Serving, eventually, fake_workers


async def held(queue: HoldQueue, deployment: str, *tenants: str, timeout_s: float = 60.0):
    """Tasks that wait, in this order."""
    tasks = []
    for tenant in tenants:
        tasks.append(asyncio.ensure_future(queue.wait(deployment, tenant, timeout_s)))
        await asyncio.sleep(0)  # its first step puts it into the queue
    return tasks


async def test_they_go_on_when_a_worker_comes():
    queue = HoldQueue()
    tasks = await held(queue, "a", "x", "x", "y")
    other = await held(queue, "b", "x")
    queue.release("a")
    await asyncio.gather(*tasks)
    assert (queue.count("a"), queue.count("b"), queue.deployments) == (0, 1, {"b"})
    queue.release("b")
    await asyncio.gather(*other)


async def test_keys_go_on_in_turn():
    queue, order = HoldQueue(), []

    async def wait(tenant):
        await queue.wait("a", tenant, 60)
        order.append(tenant)

    tasks = []
    for number, tenant in enumerate("xxxyz"):
        tasks.append(asyncio.ensure_future(wait(tenant)))
        await eventually(lambda count=number + 1: queue.count("a") == count)
    queue.release("a")
    await asyncio.gather(*tasks)
    assert "".join(order) == "xyzxx"


async def test_a_full_queue_refuses_with_the_time_to_retry():
    queue, refusals = HoldQueue(max_per_deployment=2), []
    queue.on_refused = refusals.append
    tasks = await held(queue, "a", "x", "x")
    with pytest.raises(Overloaded) as refused:
        await queue.wait("a", "x", 60)
    assert refused.value.retry_after_s == 5
    assert refusals == ["a"]
    queue.release("a")
    await asyncio.gather(*tasks)


async def test_the_total_is_bounded_too():
    queue = HoldQueue(max_per_deployment=5, max_total=2)
    tasks = [*await held(queue, "a", "x"), *await held(queue, "b", "x")]
    with pytest.raises(Overloaded):
        await queue.wait("c", "x", 60)
    for name in "ab":
        queue.release(name)
    await asyncio.gather(*tasks)


async def test_a_key_with_many_makes_room_for_one_with_few():
    queue = HoldQueue(max_per_deployment=3)
    greedy = await held(queue, "a", "x", "x", "x")
    modest = await held(queue, "a", "y")
    with pytest.raises(Overloaded):
        await greedy[2]  # its newest
    queue.release("a")
    await asyncio.gather(*greedy[:2], *modest)


async def test_who_hangs_up_leaves_the_queue():
    queue = HoldQueue(max_per_deployment=1)
    (task,) = await held(queue, "a", "x")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert queue.count("a") == 0


async def test_a_deadline_ends_the_wait():
    queue = HoldQueue()
    with pytest.raises(Unavailable, match="did not start in time") as refused:
        await queue.wait("a", "x", 0.01)
    assert refused.value.retry_after_s > 0
    assert queue.count("a") == 0


async def test_a_deployment_that_fails_refuses_all():
    queue = HoldQueue()
    tasks = await held(queue, "a", "x", "y")
    queue.refuse("a", "The model cannot be started.")
    for task in tasks:
        with pytest.raises(Unavailable, match="cannot be started"):
            await task


async def test_metrics_say_how_many_wait(start):
    serving = await start(1)
    tasks = await held(serving.router.holding, serving.router.targets[0].entry.public_id, "x", "y")
    assert 'dragoman_held_requests{engine="0",model_name="demo"} 2.0' in (await serving.get("/metrics")).text
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 'dragoman_held_requests{engine="0",model_name="demo"} 0.0' in (await serving.get("/metrics")).text


async def test_who_waits_for_a_deployment_that_is_removed_is_told_so(sockets):
    serving = Serving(fake_workers(sockets, 1))
    serving.router.hold_s = 60.0
    serving.publish([])
    serving.router.start()
    call = serving.begin("/v1/completions", {"model": "demo", "prompt": "a"})
    await eventually(lambda: serving.router.holding.deployments)
    assert 'dragoman_held_requests{engine="0",model_name="demo"} 1.0' in (await serving.get("/metrics")).text
    serving.holder.publish(Snapshot((), {}))
    answer = await call.end()
    await serving.stop()
    assert (answer.status, answer.json()["error"]["message"]) == (503, "The model has been removed.")


async def without_workers(sockets, availability: Availability, **settings) -> Serving:
    """A server whose only deployment has never been ready, or sleeps."""
    serving = Serving(fake_workers(sockets, 1), **settings)
    serving.router.hold_s, serving.availability = 60.0, availability
    if availability is Availability.ASLEEP:
        await serving.start()
        serving.publish([])
        await eventually(lambda: not serving.router.targets[0].clients)
    else:
        serving.publish([])
        serving.router.start()
    return serving


@pytest.mark.parametrize("availability", [Availability.COMING, Availability.ASLEEP])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/completions", {"model": "demo", "prompt": "a"}, 503), ("/generate", {"inputs": "a"}, 429)],
)
async def test_who_waits_while_the_server_shuts_down_is_told_so(sockets, availability, path, body, status):
    """Before the deployment's first start, and while it sleeps."""
    serving = await without_workers(sockets, availability)
    call = serving.begin(path, body)
    await eventually(lambda: serving.router.holding.deployments)
    await serving.router.stop()
    answer = await call.end()
    late = await serving.post(path, body)
    await serving.stop()
    assert (answer.status, late.status) == (status, status)
    assert "shutting down" in answer.text
    assert answer.header("retry-after")


@pytest.mark.parametrize("availability", [Availability.COMING, Availability.ASLEEP])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/completions", {"model": "demo", "prompt": "a"}, 503), ("/generate", {"inputs": "a"}, 429)],
)
@pytest.mark.parametrize(
    ("settings", "headers"), [({}, {"x_request_timeout": "0.05"}), ({"request_timeout_s": 0.05}, {})]
)
async def test_a_request_waits_until_its_own_deadline(sockets, availability, path, body, status, settings, headers):
    """Before the deployment's first start, and while it sleeps."""
    serving = await without_workers(sockets, availability, **settings)
    answer = await serving.post(path, body, **headers)
    await serving.stop()
    assert answer.status == status
    assert "deadline" in answer.text
    assert answer.header("retry-after")


async def test_the_deadline_is_counted_once_over_all_waits(sockets):
    serving = await without_workers(sockets, Availability.COMING)
    router, rounds = serving.router, []

    async def never() -> None:
        rounds.append(1)
        raise Starting("demo")

    waits = asyncio.ensure_future(router.when_known("", never, 0.2))
    while not waits.done():
        router.holding.release(next(iter(router.holding.deployments), ""))
        await asyncio.sleep(0.001)
    await serving.stop()
    with pytest.raises(TooLate):
        await waits
    assert len(rounds) > 1
