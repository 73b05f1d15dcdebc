"""Admin pages of users and groups, in the theme of the admin."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from rest_framework_api_key.models import APIKey
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

admin.site.unregister(User)
admin.site.unregister(Group)
# ApiKey replaces the library's table, which has no scopes.
admin.site.unregister(APIKey)


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):
    """Users of the admin."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, ModelAdmin):
    """Groups of permissions."""
