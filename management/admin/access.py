"""Admin pages of API keys and audit events. The text of a key is in the answer that creates it and nowhere else: a
message would carry it in a cookie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from django import forms
from django.conf import settings
from django.contrib import admin
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
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
    """The form of a key: all of a new one, with scopes as check boxes, and what may be changed of another."""

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
        if self.instance.pk is None and found.get("deployment") is not None and found.get("scopes") != ["infer"]:
            self.add_error("scopes", "A key of one deployment has the scope infer alone.")
        return found


@admin.register(ApiKey)
class ApiKeyAdmin(ServiceAdmin):
    """API keys. A key is shown once, when it is created."""

    form = ApiKeyForm
    list_display = ["name", "prefix", "scopes", "deployment", "weight", "created", "expiry_date", "revoked"]
    actions_row = actions_detail = ["revoke"]
    change_form_before_template = "admin/keys_not_required.html"
    search_fields = ["name", "prefix"]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """The form. Only superusers give the scope `manage`, which opens more than most permissions do."""
        form = super().get_form(request, obj, change, **kwargs)  # a class of this request
        form.offered = [scope for scope in SCOPES if scope != SCOPE or request.user.is_superuser]
        return form

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[str]:
        """What a key opens is never changed: whoever holds it was given that and no more."""
        return () if obj is None else ("prefix", "scopes", "deployment", "created", "revoked")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[str]:
        """Those of the form; a key that is there has more to show."""
        fields = list(ApiKeyForm.Meta.fields)
        return fields if obj is None else [fields[0], *self.get_readonly_fields(request, obj), *fields[3:]]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A revoked key stays as it is, and only superusers change one that they alone could make."""
        if obj is not None and (obj.revoked or (SCOPE in obj.scopes and not request.user.is_superuser)):
            return False
        return bool(super().has_change_permission(request, obj))

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Revoked keys stay in the list as a record."""
        return False

    def has_revoke_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        """Whoever may create keys may revoke them."""
        return bool(self.has_add_permission(request))

    def render_change_form(self, request: HttpRequest, context: Any, **kwargs: Any) -> Any:
        """The form, which says what a key does on a server that asks for none."""
        context["keys_required"] = settings.API_KEY_REQUIRED
        return super().render_change_form(request, context, **kwargs)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create the key, or change its name, expiry and limits. Raises RegistryError."""
        chosen = form.cleaned_data
        if change:
            keys.change_key(obj, actor(request), obj.name, obj.expiry_date, keys.limits_of(obj))
            return
        key, obj.text = keys.create_key(
            obj.name,
            chosen["scopes"],
            actor(request),
            obj.expiry_date,
            chosen.get("deployment"),
            keys.limits_of(obj),
        )
        obj.pk, obj._state.adding = key.pk, False

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        """The page with the new key's text."""
        back = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        context = {**self.admin_site.each_context(request), "opts": self.opts, "title": f"{obj.name} was created"}
        return TemplateResponse(
            request, "admin/key_created.html", {**context, "key": obj, "text": obj.text, "back": back}
        )

    @method_decorator(never_cache)
    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> Any:
        """The form of a new key, and the answer with its text: nobody stores them (`Cache-Control: no-store`)."""
        return super().add_view(request, form_url, extra_context)

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
