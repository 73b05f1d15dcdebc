"""What a worker does before it says that it is ready, so that no request has to wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.cpu.kernels.int8 import has_int8_dot
from engine.process.progress import Pace
from engine.step_time import FIRST_TOKENS
from engine.warm_up import warm_up
from tests.conftest import DEMO, ROOT
from tests.engine.engines import Driver, core, prompts

pytestmark = pytest.mark.full

SCRIPT = """
import sys
from pathlib import Path
import numba
from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AdapterRef, Submit
from engine.sampling.params import SamplingParams

engine = EngineCore(EngineConfig(model=sys.argv[1], dtype=sys.argv[2], quantization=sys.argv[3], threads=2))

def compiled(*args, **kwargs):
    raise AssertionError("a kernel is compiled while requests wait")

numba.cfunc = numba.njit = compiled
adapters = [None]
if sys.argv[3] == "none":
    for name in ("json", "pirate"):
        directory = Path(sys.argv[1]).parent / "demo-adapters" / name
        adapters.append(AdapterRef(content_digest(directory), str(directory)))
ways = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5, "logprobs": 3}, {"min_p": 0.1},
    {"typical_p": 0.5}, {"prompt_logprobs": 2}, {"repetition_penalty": 1.2}, {"watermark": True},
    {"logprobs": 2, "logprobs_mode": "processed", "top_k": 3}, {"bad_words": [[5]]}, {"allowed_token_ids": [4, 5, 6]},
]
number, failed = 0, []
for length in (1, 2, 40, 300):
    for way in ways:
        for adapter in adapters:
            number += 1
            params = SamplingParams(**{"max_tokens": 3, "seed": 1, **way})
            engine.submit(1, Submit(number, [7 + i % 50 for i in range(length)], params, adapter=adapter))
ended = 0
while engine.has_work:
    for output in engine.step().get(1, []):
        assert output.error is None, output.error
        ended += output.finish_reason is not None
assert ended == number, (ended, number)
print("fine")
"""


@pytest.mark.parametrize(("dtype", "quantization"), [
    ("auto", "none"),
    ("float32", "none"),
    pytest.param("bfloat16", "int8", marks=pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no AVX512_VNNI")),
])  # fmt: skip
def test_nothing_is_compiled_once_a_worker_is_ready(dtype, quantization):
    command = [sys.executable, "-c", SCRIPT, str(DEMO), dtype, quantization]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


@pytest.mark.parametrize("blocks", [2, 3, 64])
def test_it_needs_no_more_blocks_than_there_are(blocks):
    engine = core(DEMO, kv_cache_bytes=64 << 20, block_size=4, max_num_seqs=1, max_model_len=4 * blocks)
    driver = Driver(engine)
    (prompt,) = prompts(engine.info.vocab_size, (3,))
    driver.submit(1, prompt, max_tokens=2, ignore_eos=True)
    driver.run()
    assert len(driver.tokens(1)) == 2


def test_it_leaves_no_trace():
    """It writes over blocks that hold no sequence, so prefixes cached before it would be lost: it comes before any."""
    engine = core(DEMO, prefix_caching=False)
    assert engine.stats.steps == engine.stats.generation_tokens == 0
    assert engine.refresh_stats().blocks_used == 0
    assert not engine.adapters.in_slots
    (prompt,) = prompts(engine.info.vocab_size, (40,))
    driver = Driver(engine)
    driver.submit(1, prompt)
    driver.run()
    warm_up(engine.runner, engine.adapters.layers, 64, Pace(1))
    driver.submit(2, prompt)
    driver.run()
    assert driver.tokens(2) == driver.tokens(1)


def test_pace_expects_what_the_slowest_steps_took():
    pace = Pace(parts=4)
    pace.learn(1, 2.0)
    assert pace.expected_s(100) == pytest.approx(50.0)
    for _ in range(100):
        pace.learn(10, 0.1)
    assert pace.expected_s(100) == pytest.approx(0.25)


def test_a_new_engine_knows_what_steps_take():
    """The first prompt beside sequences that decode is divided by what was measured, not by a guess."""
    times = core(DEMO)._step_time
    assert times.decode_s(8) > 0.0
    assert times.most_tokens > FIRST_TOKENS
    assert times.fitting(10.0, 0) > times.fitting(1e-6, 0)
    assert times.prefill_rate(256, 0) is None  # no request is refused by a rate that no client has seen


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 50, "max_num_seqs": 10}, {"max_model_len": 60}])
def test_no_step_is_timed_that_is_longer_than_any_of_clients(limits):
    times = core(DEMO, **limits)._step_time
    assert times.decode_s(1) > 0.0
    assert times.most_tokens == FIRST_TOKENS


def test_steps_that_would_take_long_are_not_timed(monkeypatch):
    monkeypatch.setattr("engine.warm_up.TIMED_S", 0.0)
    times = core(DEMO)._step_time
    assert times.decode_s(1) > 0.0
    assert times.most_tokens == FIRST_TOKENS
