"""DJL Serving's plane over one fake worker."""

from __future__ import annotations

import pytest

from tests.unit.dialects.djl.models import Djl


@pytest.fixture
def djl(serving) -> Djl:
    return Djl(serving)
