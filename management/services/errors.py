"""The error of the services."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure


class RegistryError(Exception):
    """A change was refused; the message names the field and the reason, `failure` what is wrong with an adapter's files."""

    def __init__(self, text: str, failure: AdapterFailure | None = None) -> None:
        super().__init__(text)
        self.failure = failure
