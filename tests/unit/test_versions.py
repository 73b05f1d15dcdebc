"""Several versions of a model at once: a sequence goes on under the version that began it, and a prompt is encoded for the one
that takes it.
"""

from __future__ import annotations

import json

import pytest

from engine.messages import EmbeddingInfo
from tests.shifted import shifted
from tests.unit.fake_worker import FakeWorker, settle
from tests.unit.scripts import Gate, Script, ids, model_info, says
from tests.waiting import eventually

PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The capital", "temperature": 0}
STREAM = {**ASK, "stream": True}
TEXT = " of Spain is Madrid, and that of France is Paris."
TOKENS = [*ids(TEXT), 2]


def said(answer):
    return "".join(event["choices"][0]["text"] for event in answer.events[:-1])


@pytest.fixture
def other(sockets):
    """Makes a worker of another model version, which has other ids for the same tokens, and the ids."""
    new = shifted(sockets / "second")
    files = {"directory": str(sockets / "second"), "tokenizer_file": str(sockets / "second" / "tokenizer.json")}

    def make(**facts):
        worker = FakeWorker(sockets / "other.sock", "demo/9", info=model_info(**files, **facts))
        worker.model_version = 2
        worker.default = Script(tokens=[new[token] for token in TOKENS])
        return worker, new

    return make


async def replace_by(serving, worker):
    """The registries list the other worker alone."""
    known = serving.router.targets[0]
    serving.workers.append(await worker.start())
    serving.publish([worker])
    await eventually(lambda: serving.router.targets[0] is not known)


async def test_a_sequence_that_has_begun_waits_for_its_own_version(start, sockets, other):
    serving = await start(1, replay_wait_s=600)
    gate = Gate()
    serving.worker.default = Script(tokens=TOKENS, gate_after=3, gate=gate, die_after=4)
    call = serving.begin(PATH, STREAM)
    await gate.reached.wait()
    worker, _ = other()
    await replace_by(serving, worker)
    gate.open()
    await serving.connected(1)
    await settle()
    assert not call.task.done()
    same = FakeWorker(sockets / "same.sock", "demo/2")
    same.default = says(TEXT)
    serving.workers.append(await same.start())
    serving.publish([worker, same])
    assert said(await call.end()) == TEXT
    assert not worker.submits


async def test_a_version_with_an_equal_tokenizer_has_its_own_chat_template(start, sockets):
    """Converted tokenizers of equal content are one file."""
    second = sockets / "second"
    second.mkdir()
    (second / "tokenizer_config.json").write_text(json.dumps({"chat_template": "The capital"}))
    serving = await start(1)
    worker = FakeWorker(sockets / "other.sock", "demo/9", info=model_info(directory=str(second)))
    worker.model_version, worker.default = 2, says(TEXT)
    await replace_by(serving, worker)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Where?"}]}
    assert (await serving.post("/v1/chat/completions", body)).status == 200
    assert worker.submits[0].prompt_token_ids == ids("The capital")


@pytest.mark.parametrize("change", ["numerics", "model_version"])
async def test_workers_of_other_kinds_do_not_continue_a_sequence(start, sockets, change):
    serving = await start(2, replay_wait_s=0.01)
    first, second = serving.workers
    setattr(second, change, "other" if change == "numerics" else 2)
    gate = Gate()
    first.default = second.default = Script(tokens=TOKENS, gate_after=3, gate=gate, die_after=4)
    serving.publish([first])
    call = serving.begin(PATH, STREAM)
    await gate.reached.wait()
    serving.publish([second])
    gate.open()
    answer = await call.end()
    assert "error" in answer.events[-2]


@pytest.mark.parametrize(
    "body", [ASK, {**ASK, "n": 2, "temperature": 1}, {**ASK, "use_beam_search": True, "max_tokens": 2}]
)
async def test_a_prompt_is_encoded_again_for_the_version_that_takes_it(start, other, body):
    """The only worker drains before the web process knows of its successor."""
    serving = await start(1, replay_wait_s=600)
    serving.worker.draining = True
    call = serving.begin(PATH, body)
    await eventually(lambda: serving.worker.submits)
    worker, new = other()
    await replace_by(serving, worker)
    answer = (await call.end()).json()
    assert worker.submits[0].prompt_token_ids == [new[token] for token in ids("The capital")]
    assert answer["usage"]["prompt_tokens"] == len(ids("The capital"))
    if body is ASK:
        assert answer["choices"][0]["text"] == TEXT


async def test_inputs_of_embeddings_are_encoded_again(start, other):
    embedding = EmbeddingInfo(4, None, False, "", False)
    serving = await start(1, info=model_info(embedding=embedding, max_adapter_rank=0), replay_wait_s=600)
    serving.worker.draining = True
    call = serving.begin("/v1/embeddings", {"model": "demo", "input": "The capital"})
    await eventually(lambda: serving.worker.embeds)
    worker, new = other(embedding=embedding, max_adapter_rank=0)
    await replace_by(serving, worker)
    vector = (await call.end()).json()["data"][0]["embedding"]
    assert vector[0] == sum(new[token] for token in ids("The capital"))


async def test_a_deployment_goes_back_to_a_version_that_still_runs(start, other):
    serving = await start(1)
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=TOKENS, gate_after=3, gate=gate))
    serving.worker.default = says(TEXT)
    call = serving.begin(PATH, STREAM)
    await gate.reached.wait()
    worker, _ = other()
    await replace_by(serving, worker)
    known = serving.router.targets[0]
    serving.publish([serving.worker])
    await eventually(lambda: serving.router.targets[0] is not known)
    again = await serving.post(PATH, STREAM)
    gate.open()
    assert said(again) == said(await call.end()) == TEXT
    assert not worker.submits
