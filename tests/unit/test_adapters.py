"""Adapters: named by clients, loaded and unloaded while serving, kept by workers as the registry says."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.adapters.failures import AdapterCode, AdapterFailure
from inference.dialects.mindie.settings import MindieSettings
from inference.errors import AdapterNotFound, AdapterRefused
from management.snapshot import AdapterEntry, Availability, Snapshot
from tests.unit.fake_worker import settle
from tests.unit.scripts import EMBEDDING
from tests.unit.serving import Serving, fake_workers
from tests.waiting import eventually

PIRATE = AdapterEntry("pirate", "d1", "/adapters/pirate", 1)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAMED = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}
ASK = {"prompt": "The capital", "max_tokens": 2}
RANK = AdapterFailure(AdapterCode.RANK, {"tensor": "a", "limit": 64, "rank": 512})
FILES = "adapter_config.json"


@pytest.fixture
async def known(serving):
    """The files of one adapter lie where a client says."""
    serving.registry.files["/adapters/pirate"] = PIRATE
    return serving


def told(serving):
    return [(command.action, command.adapter.digest) for command in serving.worker.commands]


async def test_a_loaded_adapter_answers_by_its_name(known):
    assert (await known.post("/v1/completions", {**ASK, "model": "pirate"})).status == 404
    answer = await known.post(LOAD, NAMED)
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    assert told(known) == [("load", "d1")]
    for model in ("pirate", "demo:pirate"):
        answer = await known.post("/v1/completions", {**ASK, "model": model})
        assert (answer.status, answer.json()["model"]) == (200, model)
        assert known.worker.submits[-1].adapter.digest == "d1"
    assert (await known.post("/v1/completions", {**ASK, "model": "demo"})).status == 200
    assert known.worker.submits[-1].adapter is None


async def test_an_unloaded_adapter_is_forgotten_by_the_worker(known):
    await known.post(LOAD, NAMED)
    await known.post("/v1/completions", {**ASK, "model": "pirate"})
    assert (await known.post(UNLOAD, {"lora_name": "pirate"})).status == 200
    assert (await known.post("/v1/completions", {**ASK, "model": "pirate"})).status == 404
    await eventually(lambda: ("unload", "d1") in told(known))
    assert (await known.post(UNLOAD, {"lora_name": "pirate"})).status == 404


async def test_only_what_is_served_is_unloaded(known, monkeypatch):
    """Another model's adapter of the same name, which no deployment serves at the moment, stays in the registry."""
    removed = []

    async def remove(name, actor, deployment):
        removed.append((name, deployment))

    await known.post(LOAD, NAMED)
    monkeypatch.setattr(known.registry, "remove_adapter", remove)
    assert (await known.post(UNLOAD, {"lora_name": "pirate"})).status == 200
    assert removed == [("pirate", "demo")]


class SlowRemovals:
    """The registry's removals, each of which waits until it may go on."""

    def __init__(self, registry, monkeypatch):
        self._remove, self.begun, self.go_on = registry.remove_adapter, 0, asyncio.Event()
        monkeypatch.setattr(registry, "remove_adapter", self._slowly)

    async def _slowly(self, *asked):
        self.begun += 1
        await self.go_on.wait()
        await self._remove(*asked)


async def test_one_of_two_unloads_at_once_finds_nothing(known, monkeypatch):
    await known.post(LOAD, NAMED)
    removals = SlowRemovals(known.registry, monkeypatch)
    calls = [asyncio.ensure_future(known.post(UNLOAD, {"lora_name": "pirate"})) for _ in range(2)]
    await eventually(lambda: removals.begun)
    await settle()
    removals.go_on.set()
    assert [(await call).status for call in calls] == [200, 404]


async def test_an_unload_spares_what_was_registered_after_it_was_asked_for(known, monkeypatch):
    """Its adapter is removed by an earlier call, and the name given to other content, before its turn comes."""
    await known.post(LOAD, NAMED)
    known.registry.files["/adapters/pirate"] = msgspec.structs.replace(PIRATE, digest="d2")
    removals = SlowRemovals(known.registry, monkeypatch)
    control = known.services.adapters
    first = asyncio.ensure_future(control.unload("pirate", "tester"))
    await eventually(lambda: removals.begun)
    load = asyncio.ensure_future(control.load("pirate", "/adapters/pirate", None, True, "tester"))
    await settle()
    second = asyncio.ensure_future(control.unload("pirate", "tester"))
    await settle()
    removals.go_on.set()
    await first
    await load
    with pytest.raises(AdapterNotFound):
        await second
    assert [adapter.digest for adapter in known.adapters] == ["d2"]


async def test_the_same_name_again(known):
    await known.post(LOAD, NAMED)
    assert (await known.post(LOAD, NAMED)).status == 400
    assert (await known.post(LOAD, {**NAMED, "load_inplace": True})).status == 200


@pytest.mark.parametrize("name", ["demo", "", None])
async def test_names_that_cannot_be(known, name):
    assert (await known.post(LOAD, {**NAMED, "lora_name": name})).status == 400
    assert told(known) == []


async def test_what_a_worker_refuses_is_not_registered(known):
    known.worker.replies["load"] = RANK
    answer = await known.post(LOAD, NAMED)
    assert answer.status == 500
    assert "rank 512" in answer.text
    assert told(known)[-1] == ("unload", "d1")
    assert known.adapters == ()


async def test_every_worker_reads_it_first(start):
    serving = await start(2)
    serving.registry.files["/adapters/pirate"] = PIRATE
    serving.workers[1].replies["load"] = AdapterFailure(AdapterCode.CACHE_IN_USE)
    assert (await serving.post(LOAD, NAMED)).status == 500
    assert [[command.action for command in w.commands] for w in serving.workers] == [["load", "unload"]] * 2
    assert serving.adapters == ()


async def test_without_a_worker_nothing_is_loaded(known):
    known.worker.die()
    await eventually(lambda: not known.router.ready)
    assert (await known.post(LOAD, NAMED)).status == 503


MINDIES = [
    (NAMED, 200, "Success: LoRA adapter 'pirate' added successfully."),
    ({"lora_name": "a b", "lora_path": "/x"}, 503, "Input invalid lora name"),
    ({"lora_name": "a", "lora_path": "/x/../y"}, 503, "Input invalid lora path"),
    ({"lora_name": "a", "lora_path": "/x"}, 200, "Call to load LoRA method failed: Loading LoRA 'a' failed: "
     "No adapter found for '/x'."),
    (b"{", 200, "Req body converts to json fail."),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "text"), MINDIES)
async def test_mindie_loads(known, body, status, text):
    answer = await known.post(LOAD, body, plane="management")
    assert (answer.status, answer.text) == (status, text)


async def test_mindie_knows_what_is_there_and_how_much_may_be(start):
    serving = await start(mindie=MindieSettings(max_loras=1))
    serving.registry.files["/adapters/pirate"] = PIRATE
    assert (await serving.post(LOAD, NAMED, plane="management")).text.startswith("Success")
    again = await serving.post(LOAD, NAMED, plane="management")
    assert again.text == "The LoRA adapter 'pirate' has already been added."
    more = await serving.post(LOAD, {**NAMED, "lora_name": "other"}, plane="management")
    assert "exceeds 'max_loras'" in more.text
    gone = await serving.post(UNLOAD, {"lora_name": "pirate"}, plane="management")
    assert gone.text == "Success: LoRA adapter 'pirate' removed successfully."
    unknown = await serving.post(UNLOAD, {"lora_name": "pirate"}, plane="management")
    assert unknown.text == "The LoRA adapter 'pirate' cannot be found."


@pytest.mark.parametrize(("failure", "text"), [
    (RANK, "LoRA rank is greater than max_lora_rank."),
    (AdapterFailure(AdapterCode.NO_OBJECT, {"file": FILES}), "The LoRA adapter 'pirate' is invalid."),
], ids=["rank", "files"])  # fmt: skip
async def test_mindie_tells_refusals_in_its_own_words(known, failure, text):
    known.worker.replies["load"] = failure
    answer = await known.post(LOAD, NAMED, plane="management")
    assert answer.text == f"Call to load LoRA method failed: {text}"


@pytest.mark.parametrize(("failure", "text"), [
    (RANK, "LoRA rank 512 is greater than max_lora_rank 64."),
    (
        AdapterFailure(AdapterCode.REWRITES_BASE, {"file": FILES, "init": "'pissa'"}),
        "Adapters with init_lora_weights='pissa' rewrite the base model's weights and are not supported.",
    ),
    (
        AdapterFailure(AdapterCode.FIELD_NOT_SUPPORTED, {"file": FILES, "field": "modules_to_save"}),
        f"Unsupported modules_to_save: {FILES}: modules_to_save is not supported",
    ),
    (
        AdapterFailure(AdapterCode.NOT_LINEAR, {"tensor": "lm_head.modules_to_save.weight"}),
        "Unsupported modules_to_save: lm_head.modules_to_save.weight: only LoRA on linear layers is supported",
    ),
    (
        AdapterFailure(AdapterCode.FIELD_NOT_SUPPORTED, {"file": FILES, "field": "use_qalora"}),
        f"{FILES}: use_qalora is not supported",
    ),
], ids=["rank", "init", "field", "tensor", "other"])  # fmt: skip
async def test_vllm_tells_refusals_in_its_own_words(known, failure, text):
    known.worker.replies["load"] = failure
    answer = await known.post(LOAD, NAMED)
    assert (answer.status, answer.json()["error"]["message"]) == (500, text)


def register(serving, **options):
    serving.adapters = (AdapterEntry("pirate", "d1", "/adapters/pirate", 1, **options),) if options else ()
    serving.publish()


async def test_what_the_registry_says_reaches_the_worker(serving):
    register(serving, preload=True)
    await eventually(lambda: told(serving) == [("load", "d1")])
    register(serving, pinned=True)
    await eventually(lambda: told(serving)[1:] == [("pin", "d1")])
    register(serving, preload=True)
    await eventually(lambda: told(serving)[2:] == [("unpin", "d1")])
    register(serving)
    await eventually(lambda: told(serving)[3:] == [("unload", "d1")])


async def test_what_a_worker_cannot_do_is_told_again(serving, monkeypatch):
    monkeypatch.setattr("inference.workers.adapter_sync.RESEND_AFTER_S", 0.01)
    serving.worker.replies["load"] = "every adapter in the cache is in use"
    register(serving, preload=True)
    await eventually(lambda: len(told(serving)) >= 2)
    del serving.worker.replies["load"]
    register(serving, pinned=True)
    await eventually(lambda: ("pin", "d1") in told(serving))


async def test_a_worker_without_adapters_is_told_of_none(start):
    serving = await start(info=EMBEDDING)
    register(serving, pinned=True)
    assert (await serving.post("/v1/embeddings", {"input": "a"})).status == 200
    await eventually(lambda: serving.router.targets[0].entry.adapters)
    assert told(serving) == []


async def test_a_deployment_that_was_never_ready_is_woken(sockets):
    serving = Serving(fake_workers(sockets, 1))
    serving.registry.files["/adapters/pirate"] = PIRATE
    serving.availability, serving.router.hold_s = Availability.ASLEEP, 60.0
    serving.publish([])
    serving.router.start()
    call = asyncio.ensure_future(serving.post(LOAD, NAMED))
    await eventually(lambda: serving.router.holding.deployments or call.done())
    await serving.worker.start()
    serving.publish()
    assert (await call).status == 200
    assert told(serving) == [("load", "d1")]
    await serving.stop()


async def test_no_model_waits_for_anothers_adapters(known, monkeypatch):
    """The worker of "demo" does not answer, and an adapter of another model is removed."""
    known.worker.silent = True
    call = asyncio.ensure_future(known.post(LOAD, NAMED))
    await eventually(lambda: known.worker.commands)
    (entry,) = known.holder.current.deployments
    second = msgspec.structs.replace(entry, name="second", model="second", workers=(), adapters=(SAME,))
    known.holder.publish(Snapshot((entry, second), {}))
    assert (await known.post(UNLOAD, {"lora_name": "other"})).status == 200
    assert not call.done()
    known.worker.die()
    assert (await call).status == 503


async def test_nothing_stays_on_a_worker_of_a_load_that_is_cancelled(known):
    """Its client has left, or the server shuts down: no registry knows of the pin."""
    known.worker.silent = True
    load = known.services.adapters.load("pirate", "/adapters/pirate", None, False, "", pinned=True)
    call = asyncio.ensure_future(load)
    await eventually(lambda: known.worker.commands)
    known.worker.silent = False
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert told(known) == [("load", "d1"), ("unpin", "d1"), ("unload", "d1")]


SAME = AdapterEntry("other", "d1", "/adapters/pirate", 1)


async def test_content_of_two_names_is_pinned_if_one_of_them_is(serving):
    pinned = AdapterEntry("pirate", "d1", "/adapters/pirate", 1, pinned=True)
    serving.adapters = (pinned, msgspec.structs.replace(SAME, preload=True))
    serving.publish()
    await eventually(lambda: told(serving) == [("load", "d1"), ("pin", "d1")])


@pytest.mark.parametrize(("pinned", "undone"), [(True, []), (False, [("unpin", "d1")])], ids=["pinned", "not"])
async def test_a_name_that_is_not_registered_leaves_its_content_as_other_names_want_it(
    serving, monkeypatch, pinned, undone
):
    serving.adapters = (msgspec.structs.replace(SAME, pinned=pinned, preload=True),)
    serving.publish()
    await eventually(lambda: serving.worker.commands)
    await settle()
    serving.registry.files["/adapters/pirate"] = PIRATE

    async def refuse(*arguments, **options):
        raise AdapterRefused("name: must differ")

    monkeypatch.setattr(serving.registry, "register_adapter", refuse)
    known = len(told(serving))
    control, fetched = serving.services.adapters, ("pirate", "/adapters/pirate", None, False, "tester")
    with pytest.raises(AdapterRefused):
        await control.load(*fetched, preload=True, pinned=True)
    assert told(serving)[known:] == [("load", "d1"), ("pin", "d1"), *undone]


async def test_a_worker_that_dies_while_it_reads_leaves_nothing_with_the_others(start):
    serving = await start(2)
    serving.registry.files["/adapters/pirate"] = PIRATE
    serving.workers[1].silent = True
    call = asyncio.ensure_future(serving.post(LOAD, NAMED))
    await eventually(lambda: serving.workers[1].commands)
    serving.workers[1].die()
    assert (await call).status == 503
    assert told(serving) == [("load", "d1"), ("unload", "d1")]
    assert serving.adapters == ()
