"""The settings for links and for models that clients may deploy."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from config.options import Options


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "::1", "front_port": 9}, "http://[::1]:9"),
        ({"host": "0.0.0.0"}, f"http://{socket.gethostname()}:8000"),
        ({"public_url": "https://models.example/base/"}, "https://models.example/base"),
    ],
)
def test_the_address_in_links(settings, url):
    assert Options(**settings).front_url == url


@pytest.mark.parametrize("url", ["models.example", "ftp://x", "https://x?y", "https://"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValidationError, match="public_url"):
        Options(public_url=url)


def test_folders_of_models():
    assert Options().allowed_model_roots is None
    assert Options(host="0.0.0.0").allowed_model_roots == []
    assert Options(host="0.0.0.0", model_roots=["/models"]).allowed_model_roots == [Path("/models")]
    assert Options(model_roots=[]).allowed_model_roots == []
