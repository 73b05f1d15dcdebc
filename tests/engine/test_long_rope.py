"""Models with rotary embeddings of the kind longrope, below, above and across their original length."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models import long_rope
from tests.engine.engines import NEAR_TIE, Driver, core, prompts
from tests.models.random_models import make_model
from tests.models.tiny_families import ORIGINAL

FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [3.0 + i for i in range(8)]}
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **FACTORS}
LENGTHS = (5, ORIGINAL - 10, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL)
"""Of prompts; twenty tokens follow each."""


@pytest.fixture(scope="module", params=["phi3", "llama", "qwen2"])
def model(request, models_dir):
    fields = {"original_max_position_embeddings": ORIGINAL} if request.param == "phi3" else {}
    return make_model(models_dir / "longrope", request.param, rope_parameters=ROPE, **fields)


def assert_equal(model, prompt, tokens):
    """Each token is the best of transformers' pass over all before it, without a cache: so it chooses the frequencies
    for their number.
    """
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = list(prompt)
    for i, token in enumerate(tokens):
        with torch.inference_mode():
            logits = whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        if token != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert gap < NEAR_TIE, f"token {i} after {len(prompt)}: {token}, top-2 gap {gap:.2e}"
            return
        ids.append(token)


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 17, "max_num_seqs": 4},
    {"speculative_tokens": 4},
    {"prefix_caching": False},
])  # fmt: skip
def test_sequences_of_every_length_in_one_batch(model, options):
    driver = Driver(core(model, **options))
    asked = prompts(400, LENGTHS)
    for i, prompt in enumerate(asked):
        assert driver.submit(i, prompt, max_tokens=20, ignore_eos=True) is None
        driver.step()
    driver.run()
    for i, prompt in enumerate(asked):
        assert len(driver.tokens(i)) == 20
        assert_equal(model, prompt, driver.tokens(i))
    driver.engine.close()


def test_long_and_short_sequences_share_no_blocks(model):
    driver = Driver(core(model, block_size=4))
    (prompt,) = prompts(400, (ORIGINAL,), seed=3)
    for i, length in enumerate((ORIGINAL - 8, ORIGINAL + 8, ORIGINAL - 8, ORIGINAL + 8)):
        longer = (prompt + prompt)[:length]
        driver.submit(i, longer, max_tokens=4, ignore_eos=True)
        driver.run()
        assert_equal(model, longer, driver.tokens(i))
    cached = [driver.outputs[i][0].cached_tokens for i in range(4)]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= ORIGINAL - 12
    driver.engine.close()


def test_a_sequence_that_goes_on_here_is_long_from_its_start(model):
    """As after the death of the worker that began it."""
    driver = Driver(core(model))
    (prompt,) = prompts(400, (ORIGINAL - 4,), seed=5)
    driver.submit(0, prompt, max_tokens=16, ignore_eos=True)
    driver.run()
    tokens = driver.tokens(0)
    driver.submit(1, prompt, generated=tokens[:8], max_tokens=16, ignore_eos=True)
    driver.run()
    assert driver.tokens(1) == tokens[8:]
    driver.engine.close()


def test_the_whole_length_is_served(model):
    engine = core(model)
    assert engine.info.max_model_len == 256
    engine.close()


def test_an_embedding_that_does_more_is_left_alone(model):
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert long_rope.original_length(whole, 256) == ORIGINAL
    rotary = type(whole.model.rotary_emb)

    class Other(rotary):
        def forward(self, x, position_ids):
            cosines, sines = super().forward(x, position_ids)
            return cosines, sines * (1 + position_ids[..., None] % 2)

    whole.model.rotary_emb.__class__ = Other
    assert long_rope.original_length(whole, 256) is None
