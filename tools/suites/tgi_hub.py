"""A plugin of pytest for huggingface_hub's tests of text generation, chat and embeddings: they ask our server.

`tools.suites.tgi` loads it. The tests name models and providers of the hub; here each client is one of the server's URL,
and asks for its default model. The vendor skips these tests because they need its network; here they run. It never changes
what they assert.
"""

from __future__ import annotations

import os
import re
from functools import wraps
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

ASKED = re.compile(r"chat_completion|text_generation|generate|TestOpenAICompatibility|TextGenerationErrors")
NOT_HERE = re.compile(r"non_tgi|hf_inference|\[(?!hf-inference)")
"""Servers that are not TGI, and the same test once more for each provider."""
URL = os.environ["SUITE_URL"]
FILE = Path(__file__)
"""What the tests would download, pictures and sounds, which none of those asked here reads."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that ask such a server, also those that are skipped."""
    kept = [item for item in items if ASKED.search(item.nodeid) and not NOT_HERE.search(item.name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    for item in kept:
        for node in item.listchain():
            node.own_markers = [marker for marker in node.own_markers if marker.name not in ("skip", "production")]
    items[:] = kept


def aimed(cls: type) -> None:
    """Let the clients of this class ask the server."""
    start = cls.__init__

    @wraps(start)
    def started(self: Any, model: str | None = None, **options: Any) -> None:
        both = model is not None and "base_url" in options
        if not both:
            model = URL
            options = {key: value for key, value in options.items() if key not in ("provider", "base_url")}
        start(self, model, **options)

    cls.__init__ = started
    for name in ("chat_completion", "text_generation", "feature_extraction"):
        method = getattr(cls, name)

        @wraps(method)
        def called(self: Any, *given: Any, method: Any = method, **options: Any) -> Any:
            options.pop("model", None)
            return method(self, *given, **options)

        setattr(cls, name, called)


for client in (InferenceClient, AsyncInferenceClient):
    aimed(client)
huggingface_hub.hf_hub_download = lambda *_, **__: str(FILE)
