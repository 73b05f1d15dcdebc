"""Form fields for lists of names, written as text."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.validators import ProhibitNullCharactersValidator


class NamesField(forms.CharField):
    """Names, separated by commas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("encoder", "decoder"):
            kwargs.pop(name, None)
        super().__init__(*args, **kwargs)

    def prepare_value(self, value: Any) -> Any:
        """A stored list as text."""
        return ", ".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> Any:
        """Text as a list."""
        ProhibitNullCharactersValidator()(value)  # CharField's own sees the list
        return [name.strip() for name in (value or "").split(",") if name.strip()]

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Whether the lists differ."""
        return bool((initial or []) != self.to_python(data))


class ProvidersField(NamesField):
    """Providers, separated by semicolons, each with its regions: `AWS: us-east-1, eu-west-1; GCP`."""

    def prepare_value(self, value: Any) -> Any:
        """A stored list as text."""
        if not isinstance(value, list):
            return value
        return "; ".join(f"{each['name']}: {', '.join(each.get('regions') or [])}".rstrip(": ") for each in value)

    def to_python(self, value: Any) -> Any:
        """Text as a list."""
        ProhibitNullCharactersValidator()(value)
        found = []
        for part in (value or "").split(";"):
            name, _, regions = part.partition(":")
            if name.strip():
                found.append({"name": name.strip(), "regions": NamesField.to_python(self, regions)})
        return found
