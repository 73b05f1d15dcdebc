"""Calls `/sg_inf` over Django's client, without workers."""

from __future__ import annotations

import json

import pytest

from management.models import Deployment
from tests.conftest import DEMO


@pytest.fixture
def call(client):
    """Send a JSON body with a wrong Content-Type, which is ignored. Returns the response."""

    def send(method, path, body=None, **headers):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body)
        return client.generic(method, path, data, "text/plain", headers=headers)

    return send


@pytest.fixture
def create(call):
    """Create a deployment of the demo model and return its row."""

    def send(**fields):
        response = call("POST", "/sg_inf/create", {"name": "chat", "model": str(DEMO), **fields})
        assert response.status_code == 200, response.content
        assert response.json() == {"success": True, "message": {"inf_id": response.json()["message"]["inf_id"]}}
        return Deployment.objects.get(public_id=response.json()["message"]["inf_id"])

    return send
