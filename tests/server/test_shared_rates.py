"""Rates that two web processes count together through a real Redis."""

from __future__ import annotations

import re
import time

import pytest

from tests import calls
from tests.cluster import Cluster
from tests.own_redis import PASSWORD, OwnRedis
from tests.waiting import wait_until


@pytest.fixture
def own():
    server = OwnRedis()
    yield server
    server.stop()


def settle(redis) -> None:
    """Wait until every process has exchanged once more."""
    seconds, microseconds = redis.time()
    wait_until(lambda: redis.zcount("dragoman:processes", seconds + microseconds / 1e6, "+inf") == 2)


def test_two_web_processes(own, tmp_path):
    """Requests of a model that is not there are charged too, so no worker is needed."""
    cluster = Cluster(tmp_path / "var", {"DRAGOMAN_REDIS_URL": own.url, "DRAGOMAN_REQUIRE_API_KEY": "true"})
    cluster.run("migrate", "--verbosity", "0")
    key = cluster.run("createkey", "limited", "--requests-per-minute", "30").strip()
    metrics = cluster.run("createkey", "metrics", "--scope", "metrics").strip()

    def statuses(count: int) -> list[int]:
        body, headers = {"model": "none", "prompt": "x"}, {"authorization": f"Bearer {key}"}
        url = f"{cluster.url}/v1/completions"
        return [calls.post(url, json=body, headers=headers, timeout=60).status_code for _ in range(count)]

    def reachable() -> set[str]:
        pages = [
            calls.get(f"{cluster.url}/metrics", headers={"authorization": f"Bearer {metrics}"}, timeout=60).text
            for _ in range(8)
        ]
        return {re.search(r"^dragoman_redis_reachable (\d)", page, re.MULTILINE)[1] for page in pages}

    webs = [cluster.start("web") for _ in range(2)]
    try:
        wait_until(
            lambda: all((cluster.runtime / f"{web.pid}.listeners").exists() for web in webs), 120, lambda: cluster.log
        )
        wait_until(lambda: own.client.zcard("dragoman:processes") == 2, 60, lambda: cluster.log)
        begin = time.monotonic()
        assert set(statuses(20)) == {404}
        for _ in range(2):  # first each tells its charges, then each hears of the other's
            settle(own.client)
        found = statuses(90)
        # In a burst each may admit the 10 that are left; without the other's charges it would be 40 together.
        assert found.count(404) <= 20 + (time.monotonic() - begin) / 2 + 1
        assert found[-1] == 429
        own.stop()
        wait_until(lambda: reachable() == {"0"}, 60, lambda: cluster.log)
        assert set(statuses(4)) <= {404, 429}
        assert PASSWORD not in cluster.log
        own.start()
        wait_until(lambda: reachable() == {"1"}, 60, lambda: cluster.log)
    finally:
        for web in webs:
            web.terminate()
        assert [web.wait(60) for web in webs] == [0, 0], cluster.log
