"""Cases that take long where Triton's interpreter runs in place of a device; on a device they are all run."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A case of these values."""
    return pytest.param(*values, marks=pytest.mark.slow)
