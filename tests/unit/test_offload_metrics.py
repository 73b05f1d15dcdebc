"""The metrics of the KV offload: of tiers that there are, with names that are there from the beginning."""

from __future__ import annotations

from engine.offload.stats import OffloadStats, TierStats
from tests.waiting import eventually

LABELS = 'engine="0",model_name="demo"'


async def test_workers_tiers_are_added_up(start):
    serving = await start(2)
    for number, worker in enumerate(serving.workers, 1):
        worker.stats.offload = OffloadStats(
            TierStats(100 * number, 1, 2, 3), TierStats(1000 * number, 10, 20, 30), damaged=number, late=1
        )
        worker.beat()
    await eventually(lambda: all(c.stats.offload for t in serving.router.targets for c in t.clients.values()))
    text = (await serving.get("/metrics")).text
    for line in (
        f'dragoman_kv_offload_bytes{{{LABELS},tier="memory"}} 300.0',
        f'dragoman_kv_offload_bytes{{{LABELS},tier="disk"}} 2000.0',  # one folder
        f'dragoman_kv_offload_hits_total{{{LABELS},tier="disk"}} 20.0',
        f'dragoman_kv_offload_stored_total{{{LABELS},tier="memory"}} 4.0',
        f'dragoman_kv_offload_evictions_total{{{LABELS},tier="memory"}} 6.0',
        f'dragoman_kv_offload_lost_total{{{LABELS},reason="damaged"}} 3.0',
        f'dragoman_kv_offload_lost_total{{{LABELS},reason="dropped"}} 0.0',
        f'dragoman_kv_offload_lost_total{{{LABELS},reason="late"}} 2.0',
    ):
        assert line in text


async def test_without_it_there_are_no_series(start):
    serving = await start(1)
    text = (await serving.get("/metrics")).text
    assert "# TYPE dragoman_kv_offload_hits_total counter" in text
    assert "dragoman_kv_offload_hits_total{" not in text
