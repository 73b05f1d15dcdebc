"""The device that these tests run on: a CUDA device, or Triton's interpreter over CPU tensors where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
