"""The conftest.py of the tests of TGI's Python client: where the tests name a model of the hub, they ask our server.

`tools.suites.tgi` copies it beside the tests, below their own conftest.py. It never changes what they assert.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def base_url() -> str:
    """The server's URL."""
    return os.environ["SUITE_URL"]


@pytest.fixture
def llama_7b_url(base_url: str) -> str:
    """The default model."""
    return base_url


@pytest.fixture
def fake_url(base_url: str, fake_model: str) -> str:
    """A path that the server does not have."""
    return f"{base_url}/models/{fake_model}"
