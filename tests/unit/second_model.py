"""A second deployment beside the first one of a test's server, whose worker comes later."""

from __future__ import annotations

import msgspec

from management.snapshot import Availability, Snapshot
from tests.unit.fake_worker import FakeWorker


class Second:
    """The model "second" beside "demo"."""

    def __init__(self, serving, sockets):
        self._serving = serving
        self._worker = FakeWorker(sockets / "second.sock", "second/0")
        serving.router.hold_s = 60.0

    def publish(self, availability=Availability.COMING, worker=None):
        first = self._serving.holder.current.deployments[0]
        workers = () if worker is None else (msgspec.structs.replace(first.workers[0], worker_id="second/0", epoch=worker.epoch,
                                                                     address=f"unix:{worker.path}"),)  # fmt: skip
        entry = msgspec.structs.replace(
            first, name="second", model="base", is_default=False, availability=availability, workers=workers
        )
        self._serving.holder.publish(Snapshot((first, entry), {}))

    async def start(self):
        """It becomes ready."""
        self.publish(worker=await self._worker.start())
        await self._serving.connected(2)

    async def close(self):
        await self._worker.close()
