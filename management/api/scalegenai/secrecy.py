"""Hides secrets in what is kept and returned."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
"""What is shown instead of a secret; sent back, it means the stored one."""
_SECRET_NAME = re.compile(
    r"token(?!s|iz)|(?:auth|hf|hub|access|api|bearer|refresh|session|secret)[_-]?tokens"
    r"|secret|passw|passphrase|\bpwd\b|credential|(?:^|[_-])keys?(?![\w-])|(?:api|private|ssh|access|auth)[_-]?key|authorization|bearer",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a field or command-line flag holds a secret, by its name."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any) -> Any:
    """The same JSON value, with HIDDEN in place of secrets in fields that nobody knows."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if is_secret(name) and each is not None else without_secrets(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(each) for each in value]
    return value
