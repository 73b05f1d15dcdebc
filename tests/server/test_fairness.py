"""One key's many requests and another key's one, at a real engine that computes one request after the other."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.live import LiveServer
from tests.server.test_keys import bearer, create_key

HEAVY_REQUESTS = 60
ASK = {"model": "demo", "ignore_eos": True, "temperature": 0}
TOKENS = {"heavy": 128, "light": 16}
"""So many that a few heavy requests take longer than whatever delays the light one on its way."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    environment = {
        "DRAGOMAN_REQUIRE_API_KEY": "true",
        "DRAGOMAN_MAX_NUM_SEQS": "1",
        "DRAGOMAN_SPECULATIVE_TOKENS": "0",
        "DRAGOMAN_TARGET_TTFT_MS": "0",  # a busy machine may take longer for all of them
    }
    live = LiveServer(tmp_path_factory.mktemp("busy") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0


async def order_of_service(live, heavy: dict[str, str], light: dict[str, str]) -> tuple[int, int]:
    """How many of the heavy caller's requests had ended when the light one's was sent, and when it ended."""
    ended: list[str] = []
    some = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=live.url, timeout=None, limits=limits) as client:

        async def ask(name: str, headers: dict[str, str]) -> None:
            body = {**ASK, "max_tokens": TOKENS[name], "prompt": f"This is number {len(ended)} of {name}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            ended.append(name)
            if len(ended) == 5:
                some.set()

        tasks = [asyncio.create_task(ask("heavy", heavy)) for _ in range(HEAVY_REQUESTS)]
        await some.wait()
        before = len(ended)
        await ask("light", light)
        position = ended.index("light")
        for task in tasks:  # the rest would take long and say nothing more
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return before, position


def test_a_key_with_many_requests_does_not_delay_another(busy):
    heavy, light = bearer(create_key(busy)), bearer(create_key(busy))
    before, position = asyncio.run(order_of_service(busy, heavy, light))
    assert position - before < 15, "of the others, which were there before, few were served first"


def test_flows_of_one_key_do_not_delay_each_other(busy):
    key = bearer(create_key(busy, "--weight", "2"))
    flows = [{**key, "x-gateway-fairness-id": name} for name in ("nightly", "people")]
    before, position = asyncio.run(order_of_service(busy, *flows))
    assert position - before < 15
