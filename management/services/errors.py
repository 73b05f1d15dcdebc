"""Why a change to a registry was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure


class RegistryError(Exception):
    """The change is not possible; the text says why and names the field, `failure` what is wrong with an adapter's files."""

    def __init__(self, text: str, failure: AdapterFailure | None = None) -> None:
        super().__init__(text)
        self.failure = failure
