"""The KV offload after a step that has failed."""

from __future__ import annotations

from engine import faults
from tests.conftest import DEMO
from tests.engine.engines import Driver, core
from tests.engine.offloading import SMALL, ask, files


def test_a_failed_step_keeps_no_blocks(tmp_path):
    """They are free at once, and hold something else soon."""
    engine = core(DEMO, **SMALL, kv_offload_disk_bytes=1 << 30, kv_offload_dir=str(tmp_path / "kv"))
    try:
        driver, pool = Driver(engine), engine.scheduler.pool
        pool.filled.append((b"d" * 32, 0))
        faults.arm({faults.VARIABLE: "step:raise::1", faults.SWITCH: "1"})
        ask(driver, 0)
        assert (driver.finish_reason(0), pool.filled, files(tmp_path)) == ("error", [], [])
    finally:
        faults.arm({})
        engine.close()
