"""Steps whose layers are replayed give the same bits as steps that Python runs, whatever changes in between."""

from __future__ import annotations

import pytest

from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu import fused
from engine.cpu.kernels.threads import Program, num_threads, recording, set_num_threads
from engine.messages import AdapterCommand, AdapterRef
from tests.conftest import DEMO
from tests.engine.engines import Driver, prompts

ADAPTERS = [DEMO.parent / "demo-adapters" / name for name in ("json", "pirate")]


def decode(**options):
    """The tokens and log-probabilities of sequences that come and go, some with adapters, some in the middle of others."""
    engine = EngineCore(EngineConfig(model=str(DEMO), speculative_tokens=0, max_step_ms=0, **options))
    references = [AdapterRef(content_digest(path), str(path)) for path in ADAPTERS]
    driver = Driver(engine)
    for number, prompt in enumerate(prompts(engine.info.vocab_size, (20, 3, 40, 7, 33, 12), seed=3)):
        adapter = [None, *references][number % 3]
        assert driver.submit(number, prompt, adapter, max_tokens=9 + number, logprobs=0, ignore_eos=True) is None
        for _ in range(4):
            driver.step()
    driver.run()
    for reference in references:
        assert engine.command(AdapterCommand(0, "unload", reference)) is None
    assert driver.submit(99, prompts(engine.info.vocab_size, (30,))[0], references[1], max_tokens=5, logprobs=0) is None
    driver.run()
    engine.close()
    return {
        request: [(each.token_id, each.logprob.hex()) for output in outputs for each in output.logprobs or []]
        for request, outputs in driver.outputs.items()
    }


@pytest.fixture
def replays(monkeypatch):
    """How often a program was replayed."""
    count = [0]
    replay = Program.replay

    def counted(self, moved):
        count[0] += 1
        replay(self, moved)

    monkeypatch.setattr(Program, "replay", counted)
    return count


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"threads": 2}], ids=str)
def test_replayed_steps_have_equal_bits(options, replays, monkeypatch):
    found = decode(**options)
    assert replays[0] > 20
    monkeypatch.setattr(fused, "MOST_ROWS", 0)
    replays[0] = 0
    assert decode(**options) == found
    assert replays[0] == 0


def test_few_programs_are_kept(replays, monkeypatch):
    found = decode()
    monkeypatch.setattr(fused, "MOST_PROGRAMS", 2)
    assert decode() == found
    assert replays[0] > 20


def test_a_program_ends_with_its_helpers(replays):
    """Helpers that start or stop while the engine lives are no helpers of what was recorded before."""
    engine = EngineCore(EngineConfig(model=str(DEMO), speculative_tokens=0, threads=2, max_step_ms=0))
    threads, (prompt,) = num_threads(), prompts(engine.info.vocab_size, (20,))
    tokens = []
    try:
        for count in (threads, 1, 2):
            set_num_threads(count)
            driver = Driver(engine)
            driver.submit(1, prompt, max_tokens=8, ignore_eos=True)
            driver.run()
            tokens.append(driver.tokens(1))
    finally:
        set_num_threads(1)
        engine.close()
    assert replays[0]
    assert tokens[0] == tokens[1] == tokens[2]


def test_nothing_is_recorded_after_a_failure():
    def fail():
        with recording():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with recording() as program:
        pass
    program.replay(lambda: pytest.fail("there is no layer"))
