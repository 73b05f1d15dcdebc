"""Requests to engines with a disk tier, and what of it a test looks at."""

from __future__ import annotations

import torch

from engine.offload.block_file import PART
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.engine.engines import Driver, prompts

SMALL = {"max_model_len": 256, "max_num_seqs": 1}
"""A cache of 16 blocks: one long prompt evicts another."""
FIRST, OTHER = prompts(1700, (200, 230), seed=5)
CACHED = 192
"""The tokens of FIRST in full blocks."""


def ask(driver: Driver, number: int, prompt=FIRST, **params) -> list[int]:
    """The tokens of one request, when all that it filled is on disk."""
    assert driver.submit(number, prompt, **{"ignore_eos": True, **params}) is None
    driver.run()
    driver.engine.offload._disk.flush()
    return driver.tokens(number)


def cached(driver: Driver, number: int) -> int | None:
    return driver.outputs[number][0].cached_tokens


def stats(driver: Driver):
    return driver.engine.refresh_stats().offload


def files(tmp_path, folder="kv"):
    return sorted(path for path in (tmp_path / folder).glob("*/*/*") if path.suffix != PART)


def content(driver: Driver, prompt=FIRST) -> torch.Tensor:
    """The bytes of the prompt's cached blocks."""
    pool = driver.engine.scheduler.pool
    request = Request((0, 0), list(prompt), SamplingParams(max_tokens=1), 0.0)
    pool.extend_hashes(request)
    return driver.engine.offload._copier.read(pool.match(pool.reusable(request)))
