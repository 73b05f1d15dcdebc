"""Admin pages of users and groups, in the theme of the admin. Only superusers give rights: whoever may merely change users could
otherwise make a superuser, themselves included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, Permission, User
from django.db.models import Q
from rest_framework_api_key import admin as _registers_its_table  # noqa: F401
from rest_framework_api_key.models import APIKey
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from management.admin.base import CheckedListAdmin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.models import Model
    from django.http import HttpRequest

RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")

admin.site.unregister(User)
admin.site.unregister(Group)
# ApiKey replaces the library's table, which has no scopes.
admin.site.unregister(APIKey)


@admin.register(User)
class UserAdmin(DjangoUserAdmin, CheckedListAdmin):
    """Users of the admin."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[str]:
        """Rights are shown to others and not changed by them."""
        fields = tuple(super().get_readonly_fields(request, obj))
        return fields if request.user.is_superuser else (*fields, *RIGHTS)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Others do not see superusers, whom an action on many rows could otherwise touch."""
        users = super().get_queryset(request)
        return users if request.user.is_superuser else users.filter(is_superuser=False)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Who has more rights is changed, the password included, by superusers alone."""
        return bool(super().has_change_permission(request, obj)) and _may_touch(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """And deleted by them alone."""
        return bool(super().has_delete_permission(request, obj)) and _may_touch(request, obj)


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, CheckedListAdmin):
    """Groups of permissions, which superusers alone make and change."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.is_superuser)

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return bool(request.user.is_superuser)

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return bool(request.user.is_superuser)


def _may_touch(request: HttpRequest, user: Any) -> bool:
    """Whether the user, whose password could be set, has no right that the request's user lacks."""
    if request.user.is_superuser or user is None:
        return True
    return not user.is_superuser and not _rights_of(user) - _rights_of(request.user)


def _rights_of(user: Any) -> set[int]:
    """The permissions of a user and of the groups, also of one who is not active and could be made so."""
    own = Permission.objects.filter(Q(user=user) | Q(group__user=user))
    return set(own.values_list("pk", flat=True))
