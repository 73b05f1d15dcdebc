"""A prompt is computed by one engine and its sequence goes on at another: the tokens are those of one engine doing both."""

from __future__ import annotations

import shutil
import threading

import msgspec
import pytest

from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import FinishReason
from engine.kv_transfer import transfers
from engine.kv_transfer.arrivals import MAX_FETCHES, Arrival, Arrivals
from engine.kv_transfer.handle import KvSource, TransferCode, new_transfer_id
from engine.messages import AdapterRef
from tests.conftest import DEMO
from tests.engine.engines import prompts
from tests.engine.few_blocks import few_blocks
from tests.engine.pairs import Door, Held, idle, joined, transport
from tests.engine.test_replay import CASES, ON, PHRASE, SAMPLED
from tests.models.random_models import make_model
from tests.models.tiny_families import ORIGINAL
from tests.waiting import wait_until

PROMPT = prompts(1700, (41,), seed=3)[0]
BLOCK = 16


def make(folder, name: str, model=DEMO, **options: object):
    """An engine and its door."""
    path = folder / f"{name}.sock"
    options = {"max_model_len": 512, "dtype": "float32", "max_step_ms": 0, **options}
    engine = EngineCore(EngineConfig(model=str(model), address=f"unix:{path}", worker_id=name, epoch=1, **options))
    return Held(engine), Door(engine, path)


__all__ = ["transport"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, transport):
    """One that prefills, in chunks, and one that decodes, with draft tokens."""
    folder = tmp_path_factory.mktemp("pair")
    prefill, door = make(folder, "p", max_num_batched_tokens=32, max_num_seqs=16, kv_transport=transport)
    decode, other = make(folder, "d", speculative_tokens=6, kv_transport=transport)
    yield prefill, decode, door
    idle(prefill.engine)
    idle(decode.engine)
    for driver in (prefill, decode):
        driver.engine.close()
    door.close()
    other.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory, transport):
    """One without a prefix cache."""
    driver, door = make(tmp_path_factory.mktemp("plain"), "plain", prefix_caching=False, kv_transport=transport)
    yield driver
    idle(driver.engine)
    driver.engine.close()
    door.close()


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_one_engine(pair, name):
    prefill, decode, _ = pair
    asked = {**CASES[name], "salt": f"equal {name}"}
    tokens, logprobs, end = prefill.alone(PROMPT, **{**asked, "salt": "alone"})
    got, more, last, fetched = joined(prefill, decode, PROMPT, **asked)
    assert (got, more) == (tokens, logprobs)
    assert (last.finish_reason, last.stop_token_id) == (end.finish_reason, end.stop_token_id)
    assert fetched == 3
    idle(prefill.engine)


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 200])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_length_of_a_prompt(pair, plain, length, prefix_caching):
    """Also with nothing generated yet, as vLLM's proxies ask for it: the receiver then samples the first token."""
    prefill = pair[0]
    decode = pair[1] if prefix_caching else plain
    prompt = prompts(1700, (length,), seed=length)[0]
    asked = {**SAMPLED, "salt": f"{length} {prefix_caching}"}
    tokens, *_ = prefill.alone(prompt, **{**asked, "salt": "alone"})
    got, _, _, fetched = joined(prefill, decode, prompt, **asked)
    assert (got, fetched) == (tokens, -(-length // BLOCK))
    *_, end = prefill.alone(prompt, hold=new_transfer_id(), **asked)
    steps = decode.engine.stats.prefill_steps
    again, _, last = decode.alone(prompt, source=end.source, **asked)
    assert again == tokens
    assert decode.engine.stats.prefill_steps == steps, "it computed what it was given"
    assert last.finish_reason == FinishReason.LENGTH
    idle(prefill.engine)


def test_only_missing_blocks_are_fetched_and_they_join_the_prefix_cache(pair):
    prefill, decode, door = pair
    long, asked = prompts(1700, (100,), seed=8)[0], {**ON, "salt": "shared"}
    tokens, *_ = prefill.alone(long, **asked)
    joined(prefill, decode, long[:50], **asked)
    got, _, _, fetched = joined(prefill, decode, long, **asked)
    assert (got, fetched, door.pulls[-1].first_block) == (tokens, 4, 3)
    computed = decode.engine.scheduler.prefix_hits
    assert decode.alone(long, **asked)[0] == tokens
    assert decode.engine.scheduler.prefix_hits - computed == 96


def test_a_sequence_goes_on_from_one_that_had_begun(pair):
    prefill, decode, _ = pair
    tokens, *_ = prefill.alone(PROMPT, **SAMPLED)
    got, _, _, fetched = joined(prefill, decode, PROMPT, generated=tokens[:9], salt="begun", **SAMPLED)
    assert (got, fetched) == (tokens[9:], -(-(len(PROMPT) + 9) // BLOCK))


def test_adapters_go_along(pair):
    prefill, decode, _ = pair
    folder = DEMO.parent / "demo-adapters" / "pirate"
    adapter = AdapterRef(content_digest(folder), str(folder))
    tokens, *_ = prefill.alone(PROMPT, adapter=adapter, **ON)
    assert tokens != prefill.alone(PROMPT, **ON)[0]
    got, _, _, fetched = joined(prefill, decode, PROMPT, adapter=adapter, salt="adapter", **ON)
    assert (got, fetched) == (tokens, 3)


def test_prompt_logprobs_come_from_the_first_engine(pair):
    prefill, decode, _ = pair
    asked = {**ON, "prompt_logprobs": 1, "logprobs": 0}
    tokens, logprobs, _ = prefill.alone(PROMPT, **asked)
    prefill.ask(PROMPT, hold=new_transfer_id(), **asked)
    prefill.run()
    outputs = prefill.outputs.pop(0)
    assert sum(len(o.prompt_logprobs or []) for o in outputs) == len(PROMPT) - 1
    rest, more, _ = decode.alone(PROMPT, generated=outputs[-1].token_ids, source=outputs[-1].source, **asked)
    assert outputs[-1].token_ids + rest == tokens
    assert more == logprobs[1:]
    idle(prefill.engine)


def test_an_ended_text_holds_nothing(pair):
    prefill, _, _ = pair
    first = prefill.alone(PROMPT, **ON)[0][0]
    *_, end = prefill.alone(PROMPT, hold=new_transfer_id(), stop_token_ids=[first], **ON)
    assert (end.finish_reason, end.source) == (FinishReason.STOP, None)
    prefill.engine.refresh_stats()
    assert not prefill.engine.transfers.holds
    tokens, _, end = prefill.alone(PROMPT, hold=new_transfer_id(), **{**ON, "max_tokens": 1})
    assert (tokens, end.finish_reason, end.source.num_blocks) == ([first], FinishReason.LENGTH, 3)
    prefill.engine.transfers.release([end.source.transfer_id])
    assert not prefill.engine.transfers.holds


@pytest.mark.parametrize("tight", ["prefill", "decode"])
def test_preempted_on_either_side(tmp_path, tight, transport):
    """One engine has so few blocks that its requests take them from each other."""
    asked = prompts(1700, tuple(range(60, 72)), seed=4)
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 32, "max_model_len": 112, "kv_transport": transport}
    prefill, p_door = make(tmp_path, "p", **options)
    decode, d_door = make(tmp_path, "d", **options)
    whole = [prefill.alone(prompt, salt="alone", **SAMPLED)[0] for prompt in asked]
    few = (prefill if tight == "prefill" else decode).engine.scheduler
    with few_blocks(few.pool, 16 if tight == "prefill" else 11):
        for i, prompt in enumerate(asked):
            if tight == "prefill":  # sequences that grow beside those that are held
                prefill.ask(prompt, request_id=100 + i, salt="y", **SAMPLED)
            prefill.ask(prompt, hold=new_transfer_id(), request_id=i, salt="x", **SAMPLED)
        begun: set[int] = set()
        while prefill.engine.has_work or decode.engine.has_work or len(begun) < len(asked):
            prefill.step()
            prefill.engine.refresh_stats()
            if tight == "prefill" or not prefill.engine.has_work:  # else all start at one moment
                for i in range(len(asked)):
                    if i not in begun and prefill.outputs[i] and prefill.finish_reason(i) == FinishReason.MOVED:
                        begun.add(i)
                        first, source = prefill.tokens(i), prefill.outputs[i][-1].source
                        decode.ask(asked[i], generated=first, source=source, request_id=i, salt="x", **SAMPLED)
            decode.step()
        assert [prefill.tokens(i) + decode.tokens(i) for i in range(len(asked))] == whole
        assert few.num_preemptions > 0
        assert decode.engine.transfers.num_fetched_blocks == sum(-(-len(prompt) // BLOCK) for prompt in asked)
    for driver, door in ((prefill, p_door), (decode, d_door)):
        idle(driver.engine)
        driver.engine.close()
        door.close()


def test_the_bits_are_those_of_one_engine(tmp_path, transport):
    """Log-probabilities are equal to the last bit, after long prompts that arrive in many pieces."""
    options = {"dtype": "bfloat16", "kv_transport": transport}
    prefill, door = make(tmp_path, "p", max_num_batched_tokens=64, **options)
    decode, other = make(tmp_path, "d", **options)
    for i, length in enumerate((30, 300, 450)):
        prompt = (PHRASE * 40)[:length]
        asked = {**SAMPLED, "logprobs": 5}
        tokens, logprobs, _ = prefill.alone(prompt, salt="alone", **asked)
        got, more, _, fetched = joined(prefill, decode, prompt, salt=str(i), **asked)
        assert (got, more) == (tokens, logprobs)
        assert fetched == -(-length // BLOCK)
    for driver, each in ((prefill, door), (decode, other)):
        idle(driver.engine)
        driver.engine.close()
        each.close()


def test_blocks_are_held_for_a_time(pair, monkeypatch):
    prefill, decode, _ = pair
    monkeypatch.setattr("engine.kv_transfer.holds.HOLD_S", 0.0)
    *_, end = prefill.alone(PROMPT, hold=new_transfer_id(), salt="late", **ON)
    holds = prefill.engine.transfers.holds
    assert (holds.num_blocks, holds.awaited) == (3, True)
    prefill.engine.refresh_stats()
    assert (bool(holds), holds.awaited) == (False, False)
    before = decode.engine.transfers.failures[TransferCode.UNKNOWN]
    tokens, *_ = prefill.alone(PROMPT, **ON)
    rest, *_ = decode.alone(PROMPT, generated=tokens[:1], source=end.source, salt="late", **ON)
    assert rest == tokens[1:]
    assert decode.engine.transfers.failures[TransferCode.UNKNOWN] == before + 1


def test_steps_are_short_while_blocks_wait_to_be_fetched(tmp_path, transport):
    """The worker hears of who comes for them between two steps."""
    prefill, door = make(tmp_path, "short", max_step_ms=1, kv_transport=transport)
    long, name = prompts(1700, (400,), seed=14)[0], new_transfer_id()
    prefill.alone(PROMPT, hold=name, **ON)
    prefill.ask(long, salt="awaited", **ON)
    prefill.step()
    (running,) = prefill.engine.scheduler.running
    assert 0 < running.num_computed_tokens < len(long)
    prefill.engine.transfers.release([name])
    prefill.run()
    prefill.ask(long, salt="not awaited", **ON)
    prefill.step()
    (running,) = prefill.engine.scheduler.running
    assert running.num_computed_tokens == len(long)
    prefill.run()
    prefill.engine.close()
    door.close()


def test_blocks_are_sent_as_they_are_filled(pair, monkeypatch):
    """The receiver asks while the prompt is being computed, and has blocks before that ends, also after a preemption."""
    monkeypatch.setattr("engine.kv_transfer.wire.BEAT_S", 0.05)
    prefill, decode, _ = pair
    prompt, name = prompts(1700, (320,), seed=12)[0], new_transfer_id()
    asked = {**SAMPLED, "salt": "early"}
    tokens, *_ = prefill.alone(prompt, **{**asked, "salt": "alone"})
    prefill.ask(prompt, hold=name, **asked)
    prefill.step()
    source = KvSource(prefill.engine.config.address, "p", 1, name, len(prompt), BLOCK)
    decode.fetch(source, prompt, "early")
    ((arrival, _),) = decode.engine.transfers._early.values()
    decode.fetch(source, prompt, "early")
    assert [each for each, _ in decode.engine.transfers._early.values()] == [arrival]
    for _ in range(3):
        prefill.step()
    scheduler = prefill.engine.scheduler
    (running,) = scheduler.running
    filled = running.num_computed_tokens // BLOCK
    assert 0 < filled < len(prompt) // BLOCK
    wait_until(lambda: arrival.staged_bytes == filled * prefill.engine.transfers._blocks.block_bytes)
    assert not arrival.settled
    scheduler._preempt(running)
    prefill.run()
    first, _, end = prefill.whole()
    assert end.source == source
    pulls = len(pair[2].pulls)
    rest, *_ = decode.alone(prompt, generated=first, source=source, **asked)
    assert first + rest == tokens
    assert (arrival.failure, len(pair[2].pulls)) == (None, pulls), "they were fetched once"
    assert not decode.engine.transfers._early
    idle(prefill.engine)


def test_early_blocks_of_no_use(pair, monkeypatch):
    """Those of another prompt are fetched again, and those that nobody asks for are forgotten."""
    prefill, decode, _ = pair
    tokens, *_ = prefill.alone(PROMPT, **SAMPLED)
    first, _, end = prefill.alone(PROMPT, hold=new_transfer_id(), salt="useless", **SAMPLED)
    decode.fetch(end.source, [*PROMPT[:-1], 5], "useless")
    ((useless, _),) = decode.engine.transfers._early.values()
    decode.fetch(msgspec.structs.replace(end.source, num_tokens=0), [], "useless")
    decode.fetch(msgspec.structs.replace(end.source, num_tokens=1 << 40), PROMPT, "useless")
    rest, *_ = decode.alone(PROMPT, generated=first, source=end.source, salt="useless", **SAMPLED)
    assert first + rest == tokens
    assert useless.cancelled
    decode.fetch(end.source, PROMPT, "released")
    ((released, _),) = decode.engine.transfers._early.values()
    decode.engine.transfers.release([end.source.transfer_id])
    assert (released.cancelled, decode.engine.transfers._early) == (True, {})
    monkeypatch.setattr("engine.kv_transfer.transfers.HOLD_S", 0.0)
    decode.fetch(end.source, PROMPT, "forgotten")
    assert decode.engine.transfers._early
    decode.engine.refresh_stats()
    assert not decode.engine.transfers._early
    idle(prefill.engine)


def test_files_that_go_from_under_a_worker_change_nothing(tmp_path):
    """What is held and fetched is of the model that was loaded, whatever is in its place by then."""
    model = shutil.copytree(DEMO, tmp_path / "model")
    prefill, door = make(tmp_path, "p", model)
    decode, other = make(tmp_path, "d", model)
    try:
        shutil.rmtree(model)
        tokens, *_ = decode.alone(PROMPT, **{**ON, "salt": "alone"})
        got, _, _, fetched = joined(prefill, decode, PROMPT, **ON)
        assert (got, fetched) == (tokens, 3)
    finally:
        for driver, listening in ((prefill, door), (decode, other)):
            driver.engine.close()
            listening.close()


@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1])
def test_sequences_about_an_original_length_take_only_blocks_of_their_kind(tmp_path, length):
    """The first token of a prompt of just that length makes the sequence a long one, for which the blocks are of no
    use.
    """
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    lengths = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 512}
    model = make_model(tmp_path, "phi3", rope_parameters=rope, **lengths)
    (prefill, door), (decode, other) = make(tmp_path, "p", model), make(tmp_path, "d", model)
    (prompt,) = prompts(400, (length,))
    tokens, *_ = decode.alone(prompt, **{**ON, "salt": "alone"})
    got, _, _, fetched = joined(prefill, decode, prompt, **{**ON, "salt": "joined"})
    assert (got, fetched) == (tokens, 0 if length == ORIGINAL else -(-length // BLOCK))
    for driver, listening in ((prefill, door), (decode, other)):
        driver.engine.close()
        listening.close()


def test_a_worker_whose_files_cannot_be_read_again_computes_everything_itself(tmp_path, monkeypatch, caplog):
    def gone(*_: object) -> str:
        raise FileNotFoundError("config.json")

    monkeypatch.setattr(transfers, "model_digest", gone)
    driver, door = make(tmp_path, "p")
    source = KvSource("unix:/nowhere", "other", 1, "t", len(PROMPT), BLOCK)
    tokens, *_ = driver.alone(PROMPT, **ON)
    assert driver.alone(PROMPT, hold=new_transfer_id(), source=source, **ON)[0] == tokens
    assert "no KV blocks are exchanged" in caplog.text
    driver.engine.close()
    door.close()


def test_fetches_ahead_of_their_prompts_delay_no_other(monkeypatch):
    """A transport that gives nothing before the prompt is computed."""
    computed = threading.Event()

    class Waits:
        def fetch(self, source, wanted, arrival):
            if source is None:
                assert computed.wait(60)

    monkeypatch.setattr("engine.kv_transfer.arrivals.MAX_EARLY", 2)
    arrivals = Arrivals(Waits())
    early = [Arrival(None, None, None, None) for _ in range(3)]
    for each in early:
        arrivals.begin(None, each, early=True)
    assert (early[2].settled, early[2].failure) == (True, TransferCode.CROWDED)
    ready = [Arrival(None, None, None, None) for _ in range(MAX_FETCHES + 2)]
    for each in ready:
        arrivals.begin("ready", each, early=False)
    wait_until(lambda: all(each.settled for each in ready))
    assert not any(each.failure or other.settled for each, other in zip(ready, early[:2], strict=False))
    computed.set()
    wait_until(lambda: all(each.settled for each in early))
