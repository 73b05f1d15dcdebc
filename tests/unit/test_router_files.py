"""Workers and sleeping deployments whose model's files cannot be used here."""

from __future__ import annotations

import time

import msgspec

from inference.workers.routing.backoff import Backoff
from inference.workers.tokenizer import ModelTokenizer
from management.snapshot import WorkerEntry
from tests.waiting import eventually


async def test_a_worker_that_could_not_be_used_is_forgotten_when_it_is_gone(start):
    serving = await start(1)
    (deployment,) = serving.holder.current.deployments
    serving.router._refused.add(WorkerEntry("demo/9", 1, "unix:/nowhere"))
    serving.router._unusable[msgspec.structs.replace(deployment, name="gone")] = Backoff(time.monotonic)
    await eventually(lambda: not serving.router._refused and not serving.router._unusable)


async def test_files_that_cannot_be_read_for_a_moment_are_read_again(start, monkeypatch):
    """As on a network file system that is not there yet."""
    load, errors = ModelTokenizer.load, [OSError("stale handle"), OSError("stale handle")]

    def once_there(*args):
        if errors:
            raise errors.pop()
        return load(*args)

    monkeypatch.setattr(ModelTokenizer, "load", once_there)
    serving = await start(1)
    await eventually(lambda: serving.router.targets and serving.router.targets[0].clients)
    assert errors == []
    assert (await serving.post("/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
