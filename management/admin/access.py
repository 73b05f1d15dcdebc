"""Admin pages of API keys and audit events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from django import forms
from django.contrib import admin, messages
from unfold.decorators import action

from management.admin.base import ReadOnlyAdmin, ServiceAdmin, actor
from management.api.authorization import SCOPE
from management.models import ApiKey, AuditEvent, Deployment
from management.models.access import SCOPES
from management.services import keys
from management.snapshot import KeyLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.http import HttpRequest, HttpResponse


class ApiKeyForm(forms.ModelForm):
    """The form of a new key, with scopes as check boxes."""

    offered: Sequence[str] = ()
    """The scopes that the user may give."""
    scopes = forms.MultipleChoiceField(
        initial=["infer"],
        widget=forms.CheckboxSelectMultiple,
        error_messages={"invalid_choice": "%(value)s is no scope that you may give."},
    )

    deployment = forms.ModelChoiceField(
        Deployment.objects.filter(deleted=False),
        required=False,
        help_text="The only deployment whose inference the key opens, with the scope infer alone; empty: all.",
    )

    class Meta:
        model = ApiKey
        fields = ["name", "scopes", "deployment", "expiry_date", *KeyLimits.__struct_fields__]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "scopes" in self.fields:
            self.fields["scopes"].choices = [(scope, scope) for scope in self.offered]

    def clean(self) -> dict[str, Any]:
        """Refuse other scopes for a key of one deployment; an empty limit is none."""
        found: dict[str, Any] = super().clean() or self.cleaned_data
        for name, default in msgspec.structs.asdict(KeyLimits()).items():
            if name in found and found[name] is None:
                found[name] = default
        if found.get("deployment") is not None and found.get("scopes") != ["infer"]:
            self.add_error("scopes", "A key of one deployment has the scope infer alone.")
        return found


@admin.register(ApiKey)
class ApiKeyAdmin(ServiceAdmin):
    """API keys. A key is shown once, when it is created."""

    form = ApiKeyForm
    list_display = ["name", "prefix", "scopes", "deployment", "weight", "created", "expiry_date", "revoked"]
    actions_row = ["revoke"]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """The form. Only superusers give the scope `manage`, which opens more than most permissions do."""
        form = super().get_form(request, obj, change, **kwargs)  # a class of this request
        form.offered = [scope for scope in SCOPES if scope != SCOPE or request.user.is_superuser]
        return form

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Keys are created and revoked, never changed."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Revoked keys stay in the list as a record."""
        return False

    def has_revoke_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        """Whoever may create keys may revoke them."""
        return bool(self.has_add_permission(request))

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create the key and show its text."""
        chosen = form.cleaned_data
        limits = keys.limits_of(obj)
        key, text = keys.create_key(
            obj.name, chosen["scopes"], actor(request), obj.expiry_date, chosen.get("deployment"), limits
        )
        obj.pk, obj._state.adding = key.pk, False
        messages.warning(request, f"The key, shown only now: {text}")

    @action(description="Revoke", permissions=["revoke"], icon="block")
    def revoke(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Revoke the key; this cannot be undone."""
        key = self.row(request, object_id)
        question, done = f"Revoke the key {key.name}?", f"{key.name} is revoked."
        return self.confirmed(request, question, lambda: keys.revoke_key(key, actor(request)), done)


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnlyAdmin):
    """Audit events: who changed what, and when."""

    list_display = ["at", "actor", "action", "target", "details"]
    list_filter = ["action"]
    search_fields = ["actor", "target"]
