"""A last layer that computes only the rows whose logits are wanted changes no bit of them, nor of what the cache keeps."""

from __future__ import annotations

import pytest

from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu import wanted_rows
from engine.cpu.fused import FusedDecoder
from engine.cpu.kernels.int8 import has_int8_dot
from engine.messages import AdapterRef
from tests.conftest import DEMO
from tests.engine.engines import Driver, prompts
from tests.models.random_models import make_model

ADAPTERS = [DEMO.parent / "demo-adapters" / name for name in ("json", "pirate")]
EIGHT_BITS = pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no products of bytes")


@pytest.fixture
def last_layers(monkeypatch):
    """How many rows each shortened last layer computed."""
    counts = []
    compute = FusedDecoder._last_layer

    def counted(self, context, wanted, space):
        counts.append(len(wanted.rows))
        return compute(self, context, wanted, space)

    monkeypatch.setattr(FusedDecoder, "_last_layer", counted)
    return counts


def answers(model, adapters=(), **options):
    """Tokens and log-probabilities, those of prompts too, of sequences that join one after another: long and short, in pieces, with
    adapters, and with draft tokens where a prompt repeats itself.
    """
    engine = EngineCore(EngineConfig(model=str(model), max_step_ms=0, max_num_batched_tokens=90, **options))
    driver = Driver(engine)
    references = [None, *(AdapterRef(content_digest(path), str(path)) for path in adapters)]
    given = prompts(engine.info.vocab_size, (200, 3, 70, 64, 33, 130), seed=8)
    given[2] = given[2][:7] * 10
    for number, prompt in enumerate(given):
        asked = {"prompt_logprobs": 1} if number in (1, 3) else {}
        adapter = references[number % len(references)]
        assert driver.submit(number, prompt, adapter, max_tokens=8, logprobs=0, ignore_eos=True, **asked) is None
        driver.step()
    driver.run()
    engine.close()
    return {
        request: [
            [(each.token_id, each.logprob.hex()) for output in outputs for each in getattr(output, name) or []]
            for name in ("logprobs", "prompt_logprobs")
        ]
        for request, outputs in driver.outputs.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "threads": 2},
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=EIGHT_BITS),
    ],
    ids=str,
)
def test_the_bits_are_those_of_all_rows(options, last_layers, monkeypatch):
    adapters = () if "quantization" in options else ADAPTERS
    found = answers(DEMO, adapters, **options)
    assert 0 in last_layers  # a piece of a prompt that samples nothing
    assert max(last_layers) > 2  # others beside one
    last_layers.clear()
    monkeypatch.setattr(wanted_rows, "LEAST_LEFT_OUT", 1000)
    assert answers(DEMO, adapters, **options) == found
    assert not last_layers


def test_a_model_of_one_layer(tmp_path, last_layers, monkeypatch):
    model = make_model(tmp_path, "llama", num_hidden_layers=1)
    found = answers(model)
    assert last_layers
    monkeypatch.setattr(wanted_rows, "LEAST_LEFT_OUT", 1000)
    assert answers(model) == found
