"""Reads refusals."""

from __future__ import annotations


def refusal(response, status=422):
    """The refused fields by dotted name, with their texts."""
    assert response.status_code == status, response.content
    body = response.json()
    assert body["success"] is False
    assert all(message.endswith(each["msg"]) for message, each in zip(body["message"], body["detail"], strict=True))
    return {
        message.partition(": ")[0]: each["msg"] for message, each in zip(body["message"], body["detail"], strict=True)
    }
