"""Thousands of requests that come, go, share prefixes and are preempted: each keeps to its own alphabet of tokens."""

from __future__ import annotations

import random

import pytest

from tests.engine.engines import Driver, core
from tests.engine.few_blocks import few_blocks
from tests.engine.test_adapters import make_adapter
from tests.models.random_models import make_model

pytestmark = pytest.mark.full

VOCABULARY = 400
ALPHABET = 4


def run_joins(models_dir, folder, joins: int, seed: int) -> None:
    """Every request may say only its own four tokens; whatever it is given of another's shows at once."""
    model = make_model(models_dir, "llama")
    adapters = [None, None, *(make_adapter(model, folder, f"j{i}", r=4 + i) for i in range(3))]
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 48, "max_model_len": 96, "block_size": 4}
    driver = Driver(core(model, max_adapters=2, **options))
    engine, rng = driver.engine, random.Random(seed)
    pool = engine.scheduler.pool
    with few_blocks(pool, 24):  # so few that some are preempted
        prefixes = [[rng.randrange(3, VOCABULARY) for _ in range(16)] for _ in range(4)]
        alphabets: dict[int, set[int]] = {}
        checked: dict[int, int] = {}
        submitted = aborted = 0
        while submitted < joins or engine.has_work:
            while submitted < joins and len(engine.requests) < 24 and rng.random() < 0.7:
                alphabet = rng.sample(range(3, VOCABULARY), ALPHABET)
                prompt = [*rng.choice(prefixes)] * rng.randrange(2) + [
                    rng.choice(alphabet) for _ in range(rng.randrange(1, 24))
                ]
                refused = driver.submit(
                    submitted, prompt, rng.choice(adapters), max_tokens=rng.randrange(1, 12), ignore_eos=True,
                    temperature=rng.choice([0.0, 1.0]), seed=submitted, top_p=rng.choice([1.0, 0.9]),
                    logit_bias=dict.fromkeys(alphabet, 100.0),
                )  # fmt: skip
                assert refused is None
                alphabets[submitted] = set(alphabet)
                submitted += 1
            if engine.requests and rng.random() < 0.1:
                engine.abort(*(lambda key: (key[0], [key[1]]))(rng.choice([*engine.requests])))
                aborted += 1
            driver.step()
            for request_id, outputs in driver.outputs.items():
                for output in outputs[checked.get(request_id, 0) :]:
                    assert set(output.token_ids) <= alphabets[request_id], f"request {request_id} has foreign tokens"
                checked[request_id] = len(outputs)
            for request_id in [r for r, outputs in driver.outputs.items() if outputs[-1].finish_reason is not None]:
                assert driver.outputs.pop(request_id)[-1].finish_reason in ("length", "abort")
                del checked[request_id], alphabets[request_id]
        assert not alphabets, "requests without an end"
        assert engine.scheduler.num_preemptions > 0
        assert aborted > joins / 100
    engine.check_integrity()


def test_ten_thousand_joins(models_dir, tmp_path):
    run_joins(models_dir, tmp_path, 10_000, seed=1)
