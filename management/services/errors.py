"""The errors of the services."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from django.core.exceptions import ValidationError

    from engine.adapters.failures import AdapterFailure


class RegistryError(Exception):
    """A change was refused; the message names the field and the reason.

    `fields` are the refused fields, each with what is wrong with it; `failure` is what is wrong with an adapter's files.
    """

    def __init__(
        self, text: str, failure: AdapterFailure | None = None, fields: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.fields = dict(fields or {})


class StoreFull(RegistryError):
    """There is no room on the disk for files that are to be kept; with room, the same call succeeds."""


class RegistryConflict(RegistryError):
    """The change does not fit the present state, or another change came first."""


class SourceNotFound(RegistryError):
    """None of the named sources of a model exists."""


class VersionExists(RegistryConflict):
    """The served name has this version already; `name` and `label` say which."""

    def __init__(self, name: str, label: str) -> None:
        super().__init__(f"{name} has a version {label} already", fields={"label": ["exists"]})
        self.name, self.label = name, label


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known one that is most like it; "" if none is."""
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def refused(error: ValidationError) -> RegistryError:
    """A model's validation error as a RegistryError."""
    if not hasattr(error, "error_dict"):
        return RegistryError("; ".join(error.messages))
    fields = {("name" if name == "__all__" else name): texts for name, texts in error.message_dict.items()}
    text = "; ".join(f"{name}: {' '.join(texts)}" for name, texts in fields.items())
    return RegistryError(text, fields=fields)
