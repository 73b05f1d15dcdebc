"""A deployment whose workers have roles: prompts go to one, and their sequences go on at another, in every dialect."""

from __future__ import annotations

import pytest

from engine.kv_transfer.handle import KvSource
from inference.workers.routing.stages import Stage
from management.snapshot import WorkerRole
from tests.unit.fake_worker import settle
from tests.unit.scripts import Gate, Script, says
from tests.unit.test_replay import ASK, LAST, PATH, STREAM, TEXT, TOKENS, give, text_of, undisturbed
from tests.waiting import eventually

PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH


async def with_roles(start, *roles: WorkerRole):
    """A server with one worker of each role, all of which say the same."""
    serving = await start(len(roles))
    for worker, role in zip(serving.workers, roles, strict=True):
        worker.role = role
    serving.publish()
    await eventually(lambda: known(serving) == sorted(roles))
    give(serving)
    return serving


def known(serving) -> list[WorkerRole]:
    """The roles of the workers that can be used."""
    return sorted(worker.role for target in serving.router.targets for worker in target.clients)


@pytest.mark.parametrize(
    ("path", "body", "plane"),
    [
        (PATH, ASK, "front"),
        (PATH, STREAM, "front"),
        (PATH, {**ASK, "prompt_logprobs": 1, "stop": [" is Paris"]}, "front"),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Where?"}], "logprobs": True, "top_logprobs": 1}, "front"),
        ("/generate", {"inputs": "The capital", "parameters": {"details": True, "decoder_input_details": True}}, "front"),
        ("/generate_stream", {"inputs": "The capital", "parameters": {"details": True, "top_n_tokens": 2}}, "front"),
        ("/v2/models/demo/generate", {"text_input": "The capital", "parameters": {"details": True}}, "mindie"),
        ("/infer", {"inputs": "The capital", "stream": True}, "mindie"),
    ],
)  # fmt: skip
async def test_plain_dialects_use_it_without_change(start, path, body, plane):
    serving = await with_roles(start, PREFILL, DECODE)
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == 200
    if path == PATH and "stop" not in body:
        expected = await undisturbed(start, body)
        if body is STREAM:
            assert text_of(answer) == text_of(expected)
        else:
            assert answer.json()["choices"] == expected.json()["choices"]
            assert answer.json()["usage"] == expected.json()["usage"]
    prefill, decode = (worker.submits for worker in serving.workers)
    (first,), (second,) = prefill, decode
    assert (bool(first.hold), first.source, first.generated) == (True, None, [])
    assert (second.hold, second.source.transfer_id, second.generated) == ("", first.hold, TOKENS[:1])
    assert (first.prompt_token_ids, first.params, first.cache_salt) == (
        second.prompt_token_ids,
        second.params,
        second.cache_salt,
    )
    assert not serving.workers[0].released
    fetches = [(each.source, each.token_ids, each.cache_salt) for each in serving.workers[1].fetches]
    source = KvSource(f"unix:{serving.worker.path}", "demo/0", 1, first.hold, len(first.prompt_token_ids), 16)
    early = [(source, first.prompt_token_ids, first.cache_salt)]
    assert fetches == (early if first.params.prompt_logprobs is None else [])


async def test_sequences_of_one_token_and_ended_ones_stay(start):
    serving = await with_roles(start, PREFILL, DECODE)
    await serving.post(PATH, {**ASK, "max_tokens": 1})
    serving.workers[0].default = says("")
    await serving.post(PATH, ASK)
    assert [bool(submit.hold) for submit in serving.workers[0].submits] == [False, True]
    assert not serving.workers[1].submits


async def test_pairs_are_chosen_by_load(start):
    serving = await with_roles(start, PREFILL, PREFILL, DECODE, DECODE)
    gate = Gate()
    for worker in serving.workers:
        worker.default = says(TEXT, gate_after=1, gate=gate)
    asked = [serving.begin(PATH, {**ASK, "prompt": f"{number} ways"}) for number in range(8)]
    await eventually(lambda: sum(len(worker.submits) for worker in serving.workers) == 16)
    assert [len(worker.submits) for worker in serving.workers] == [4, 4, 4, 4]
    for worker in serving.workers:
        gate.worker = worker
        gate.open()
    for call in asked:
        assert (await call.end()).status == 200


async def test_workers_for_both_take_all_of_it(start):
    serving = await with_roles(start, BOTH, BOTH)
    for _ in range(4):
        await serving.post(PATH, ASK)
    submits = [submit for worker in serving.workers for submit in worker.submits]
    assert [(submit.hold, submit.source) for submit in submits] == [("", None)] * 4


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_worker_alone_does_both(start, role):
    serving = await with_roles(start, role)
    answer = await serving.post(PATH, ASK)
    assert answer.json()["choices"][0]["text"] == TEXT
    (submit,) = serving.worker.submits
    assert (submit.hold, submit.source) == ("", None)


async def test_each_of_several_sequences_is_handed_over(start):
    serving = await with_roles(start, PREFILL, DECODE)
    answer = await serving.post(PATH, {**ASK, "n": 3, "temperature": 1.0, "seed": 4})
    assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT] * 3
    prefill, decode = (worker.submits for worker in serving.workers)
    assert {submit.hold for submit in prefill} == {submit.source.transfer_id for submit in decode}
    assert len({submit.hold for submit in prefill}) == 3
    assert {submit.params.seed for submit in prefill} == {submit.params.seed for submit in decode} == {4, 5, 6}


async def test_a_prefill_worker_dies(start):
    serving = await with_roles(start, PREFILL, DECODE)
    serving.workers[0].default = Script(tokens=TOKENS, die_after=0)
    answer = await serving.post(PATH, STREAM)
    assert text_of(answer)[0] == TEXT
    (submit,) = serving.workers[1].submits
    assert (submit.hold, submit.source, submit.generated) == ("", None, [])


@pytest.mark.parametrize("count", [1, 3, LAST])
async def test_a_decode_worker_dies(start, count):
    serving = await with_roles(start, PREFILL, DECODE, DECODE)
    for worker in serving.workers[1:]:
        worker.scripts.append(Script(tokens=TOKENS, die_after=count))
    answer = await serving.post(PATH, STREAM)
    text, tokens, reason = text_of(answer)
    assert (text, reason) == (TEXT, "stop")
    assert [value for _, value, _ in tokens] == [-(n + 1) / 8 for n in range(len(tokens))]


async def test_a_client_that_leaves_between_the_two(start):
    serving = await with_roles(start, PREFILL, DECODE)
    serving.workers[1].default = says(TEXT, gate_after=2)
    call = serving.begin(PATH, STREAM)
    await call.chunks(1)
    await eventually(lambda: serving.workers[1].submits)
    call.hang_up()
    await eventually(lambda: serving.workers[1].aborted)


async def given_up(serving) -> None:
    """Until both workers were told that nobody goes on from the blocks of each request."""
    prefill, decode = serving.workers
    holds = sorted(submit.hold for submit in prefill.submits)
    assert all(holds)
    await eventually(lambda: sorted(prefill.released) == sorted(decode.released) == holds)
    assert sorted(fetch.source.transfer_id for fetch in decode.fetches) == holds
    assert not any(target.balancer.record(worker).inflight for target in serving.router.targets for worker in target.clients)  # fmt: skip


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_blocks_are_given_up_where_the_first_token_ends_the_text(start, body):
    serving = await with_roles(start, PREFILL, DECODE)
    answer = await serving.post(PATH, {**body, "stop": [" of"]})
    assert answer.status == 200
    await given_up(serving)
    assert not serving.workers[1].submits


async def test_blocks_are_given_up_where_the_client_leaves_at_the_first_token(start):
    serving = await with_roles(start, PREFILL, DECODE)
    call = serving.begin(PATH, STREAM)
    call.read_no_more()
    await eventually(lambda: serving.workers[0].submits)
    await settle()
    call.hang_up()
    await given_up(serving)
    assert not serving.workers[1].submits


async def test_blocks_are_given_up_where_the_client_leaves_during_the_prompt(start):
    serving = await with_roles(start, PREFILL, DECODE)
    serving.workers[0].default = says(TEXT, gate_after=0)
    call = serving.begin(PATH, STREAM)
    await eventually(lambda: serving.workers[0].submits)
    call.hang_up()
    await given_up(serving)
    assert serving.workers[0].aborted


async def test_blocks_are_given_up_where_another_sequence_fails(start):
    serving = await with_roles(start, PREFILL, DECODE)
    serving.workers[0].by_seed = {4: says(TEXT, gate_after=0), 5: says(TEXT, fail_after=0)}
    answer = await serving.post(PATH, {**ASK, "n": 2, "temperature": 1.0, "seed": 4})
    assert answer.status == 500
    await given_up(serving)


async def test_blocks_are_given_up_where_the_client_leaves_before_they_are_fetched(start):
    serving = await with_roles(start, PREFILL, DECODE)
    prefill, decode = serving.workers
    decode.default = says(TEXT, gate_after=1)
    call = serving.begin(PATH, STREAM)
    await eventually(lambda: decode.submits)
    call.hang_up()
    await eventually(lambda: prefill.released == [prefill.submits[0].hold])
    assert decode.aborted


async def test_the_decode_worker_that_was_chosen_ahead_is_gone(start):
    """Another one goes on; the first one needs its blocks no more."""
    serving = await with_roles(start, PREFILL, DECODE, DECODE)
    prefill, first, second = serving.workers
    prefill.default = says(TEXT, gate_after=0, gate=(gate := Gate()))
    call = serving.begin(PATH, ASK)
    await eventually(lambda: first.fetches or second.fetches)
    chosen, other = (first, second) if first.fetches else (second, first)
    chosen.drain()
    await settle()
    gate.open()
    assert (await call.end()).json()["choices"][0]["text"] == TEXT
    await eventually(lambda: chosen.released == [prefill.submits[0].hold])
    assert (len(chosen.submits), len(other.submits), prefill.released) == (0, 1, [])


async def test_beams_are_not_handed_over(start):
    serving = await with_roles(start, PREFILL, DECODE)
    answer = await serving.post(PATH, {**ASK, "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": None})
    assert answer.status == 200, answer.text
    assert not any(submit.hold for worker in serving.workers for submit in worker.submits)


REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Where?"}]}


@pytest.mark.parametrize(("path", "body"), [(PATH, ASK), ("/v1/chat/completions", CHAT)])
async def test_vllms_proxies(start, path, body):
    """What a proxy does: one token with `do_remote_decode`, then all of it with the parameters of that answer."""
    serving = await with_roles(start, BOTH, BOTH)
    first = await serving.post(path, {**body, "max_tokens": 1, "kv_transfer_params": REMOTE})
    params = first.json()["kv_transfer_params"]
    (held,) = [worker for worker in serving.workers if worker.submits]
    (submit,) = held.submits
    blocks = -(-len(submit.prompt_token_ids) // 16)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(blocks)),
        "remote_engine_id": "demo/0@1",
        "remote_request_id": submit.hold,
        "remote_host": "unix:/nowhere",
        "remote_port": 0,
        "tp_size": 1,
    }
    params["remote_engine_id"] = f"{held.worker_id}@{held.epoch}"  # which a fake worker does not tell of itself
    second = await serving.post(path, {**body, "kv_transfer_params": {**params, "remote_host": "evil.example"}})
    assert second.status == 200
    assert second.json()["kv_transfer_params"] is None
    asked = next(each for worker in serving.workers for each in worker.submits if each is not submit)
    source = asked.source
    assert (source.address, source.worker_id, source.epoch) == (f"unix:{held.path}", held.worker_id, held.epoch)
    assert (source.transfer_id, source.num_tokens) == (submit.hold, len(submit.prompt_token_ids))
    assert (asked.generated, asked.hold) == ([], "")


async def test_transfers_that_lead_nowhere(start):
    """Unknown workers are not dialled, and longer outputs are not held."""
    serving = await with_roles(start, BOTH)
    strange = {"do_remote_prefill": True, "remote_engine_id": "other@1", "remote_request_id": "x", "remote_host": "h"}
    for params in (strange, {}, {"do_remote_prefill": True}, {"remote_engine_id": "demo/0@1"}, {"more": 1}, None):
        answer = await serving.post(PATH, {**ASK, "kv_transfer_params": params})
        assert answer.json()["kv_transfer_params"] is None
    answer = await serving.post(PATH, {**ASK, "max_tokens": 2, "kv_transfer_params": REMOTE})
    assert answer.json()["kv_transfer_params"] is None
    assert not any(submit.hold or submit.source for submit in serving.worker.submits)
    for params in ([], "x", {"remote_engine_id": 5}, {"do_remote_decode": "yes"}, {"remote_request_id": "x" * 600}):
        answer = await serving.post(PATH, {**ASK, "kv_transfer_params": params})
        assert answer.status == 400, params


@pytest.mark.parametrize("stage", Stage)
def test_who_suits_a_stage(stage):
    assert stage.suits(WorkerRole.BOTH)
    assert stage.suits(WorkerRole(stage.value))
    assert sum(map(stage.suits, WorkerRole)) == 2
