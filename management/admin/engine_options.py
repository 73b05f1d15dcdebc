"""Form fields for a deployment's engine options, generated from `engine.config.OPTIONS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.html import escape
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminIntegerFieldWidget, UnfoldAdminSelectWidget

from engine.config import OPTIONS

if TYPE_CHECKING:
    from engine.config import OptionField


def _is_true(value: str) -> bool:
    return value == "True"


def form_field(option: OptionField) -> forms.Field:
    """The form field of one option; an empty field means the default."""
    shared: dict[str, Any] = {"required": False, "label": option.name, "help_text": escape(option.option.description)}
    if option.choices or option.type is bool:
        names = option.choices or ("True", "False")
        choices = [("", f"Default ({option.default})"), *((name, name) for name in names)]
        coerce = str if option.choices else _is_true
        return forms.TypedChoiceField(
            choices=choices, coerce=coerce, empty_value=None, widget=UnfoldAdminSelectWidget, **shared
        )
    attributes = {"placeholder": str(option.default)}
    if option.type is float:
        return forms.FloatField(widget=UnfoldAdminDecimalFieldWidget(attrs=attributes), **shared)
    return forms.IntegerField(
        min_value=option.option.minimum,
        max_value=option.option.maximum,
        widget=UnfoldAdminIntegerFieldWidget(attrs=attributes),
        **shared,
    )


FIELDS = {name: form_field(option) for name, option in OPTIONS.items()}
EngineOptionsForm: Any = type(forms.ModelForm)("EngineOptionsForm", (forms.ModelForm,), dict(FIELDS))
"""The base class of forms with engine options."""


def chosen(cleaned: dict[str, Any]) -> dict[str, Any]:
    """The options that are not empty."""
    return {name: cleaned[name] for name in FIELDS if cleaned.get(name) is not None}
