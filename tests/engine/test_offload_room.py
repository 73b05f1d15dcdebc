"""The KV offload to a disk that is too slow for all that is computed."""

from __future__ import annotations

from tests.conftest import DEMO
from tests.engine.engines import Driver, core
from tests.engine.offloading import SMALL, ask, cached


def test_a_disk_with_room_for_a_few_blocks_gets_the_first_ones(tmp_path, monkeypatch):
    """What comes after a block that is missing is never found."""
    options = {**SMALL, "kv_offload_disk_bytes": 1 << 30, "kv_offload_dir": str(tmp_path / "kv")}
    monkeypatch.setattr("engine.offload.disk.DiskTier.room", lambda disk, count: min(count, 2))
    first = core(DEMO, **options)
    ask(Driver(first), 0)
    first.close()
    monkeypatch.undo()
    again = core(DEMO, **options)
    try:
        driver = Driver(again)
        ask(driver, 0)
        assert cached(driver, 0) == 2 * 16
    finally:
        again.close()
