"""Where equal bits are promised: a sequence's numbers do not depend on what is computed beside it, nor on the cache."""

from __future__ import annotations

import pytest

from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu.kernels.coded import can_code
from engine.cpu.kernels.int8 import has_int8_dot
from engine.messages import AdapterRef
from tests.conftest import DEMO
from tests.engine.engines import Driver, prompts
from tests.engine.equal_bits import CODED, compare, make_work

DTYPES = ["float32", "bfloat16"]
ADAPTERS = (DEMO.parent / "demo-adapters" / "json", DEMO.parent / "demo-adapters" / "pirate")
PROMPT = 75
"""Tokens: some whole blocks, which the prefix cache keeps, and a part of one."""


def numbers(driver, request_id):
    """The tokens with their log-probabilities, to the last bit."""
    return [
        (each.token_id, each.logprob.hex()) for output in driver.outputs[request_id] for each in output.logprobs or []
    ]


def ask(driver, request_id, prompt, **params):
    assert driver.submit(request_id, prompt, max_tokens=12, logprobs=0, seed=5, ignore_eos=True, **params) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_alone_in_a_batch_cold_cached_and_in_pieces(dtype, way):
    engine = EngineCore(EngineConfig(model=str(DEMO), dtype=dtype))
    prompt, *others = prompts(engine.info.vocab_size, (PROMPT, 3, 40, 130, 17, 64, 90, 5))
    alone = Driver(engine)
    ask(alone, 1, prompt, **way)
    alone.run()
    assert len(numbers(alone, 1)) == 12
    cached = Driver(engine)
    ask(cached, 1, prompt, **way)
    cached.run()
    assert cached.outputs[1][0].cached_tokens == PROMPT // engine.config.block_size * engine.config.block_size
    pieces = EngineCore(
        EngineConfig(model=str(DEMO), dtype=dtype, max_num_batched_tokens=33, max_num_seqs=32, threads=2)
    )
    together = Driver(pieces)
    adapters = [None, *(AdapterRef(content_digest(path), str(path)) for path in ADAPTERS)]
    for number, other in enumerate(others, 2):
        ask(together, number, other, adapter=adapters[number % 3], **way)
    together.step()
    ask(together, 1, prompt, **way)
    together.run()
    assert numbers(cached, 1) == numbers(alone, 1)
    assert numbers(together, 1) == numbers(alone, 1)


@pytest.mark.parametrize("arithmetic", [*DTYPES, "int8", CODED])
def test_a_crowd_that_is_preempted_on_all_threads(arithmetic):
    """Beside each sequence alone on one thread, without a cache."""
    if arithmetic == "int8" and not has_int8_dot():
        pytest.skip("this CPU has no products of bytes")
    if arithmetic == CODED and not can_code():
        pytest.skip("this CPU decodes no coded weights")
    adapters = [] if arithmetic == "int8" else [AdapterRef(content_digest(path), str(path)) for path in ADAPTERS]
    work = make_work(24, adapters)
    equal, preemptions = compare(DEMO, arithmetic, work)
    assert equal == len(work)
    assert preemptions > 0


@pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no products of bytes")
def test_eight_bit_weights():
    engine = EngineCore(EngineConfig(model=str(DEMO), dtype="bfloat16", quantization="int8"))
    prompt, *others = prompts(engine.info.vocab_size, (PROMPT, 3, 40, 130))
    alone, together = Driver(engine), Driver(engine)
    ask(alone, 1, prompt, temperature=0.0)
    alone.run()
    for number, other in enumerate(others, 2):
        ask(together, number, other, temperature=0.0)
    ask(together, 1, prompt, temperature=0.0)
    together.run()
    assert numbers(together, 1) == numbers(alone, 1)
