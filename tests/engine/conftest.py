"""What a process's first test would pay for all others: libraries load parts of themselves when they are first used."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO
from tests.engine.engines import Driver, core


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """Serve a request, and have transformers generate a token."""
    driver = Driver(core(DEMO))
    driver.submit(1, [5, 6, 7], max_tokens=2)
    driver.run()
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, do_sample=False)
