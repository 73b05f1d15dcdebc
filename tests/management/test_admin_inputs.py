"""The admin's answers to ids, queries and values that no form of its own sends, and to rows that others remove meanwhile."""

from __future__ import annotations

import pytest
from django.urls import reverse

from management.admin.access import ApiKeyAdmin
from management.models import Adapter, ApiKey
from tests.management.test_admin import browser, url

__all__ = ["browser"]


@pytest.mark.parametrize("number", ["9" * 26, "-" + "9" * 26])
def test_an_id_beyond_64_bits_is_a_row_that_is_not_there(browser, deployment, number):
    """SQLite's driver refuses to compare with such numbers."""
    form = {"name": "other", "version": number}
    page = browser.post(url("deployment", "add"), form)
    assert "Select a valid choice. That choice is not one of the available choices." in page.content.decode()
    assert browser.get(url("deployment"), {"pk__in": number}).status_code == 200
    selected = {"action": "delete_selected", "_selected_action": [number, deployment.pk], "post": "yes"}
    assert browser.post(url("deployment"), selected).status_code == 302
    deployment.refresh_from_db()
    assert deployment.deleted


@pytest.mark.parametrize("page", ["management_deployment", "auth_user", "auth_group"])
def test_a_selection_or_a_query_that_cannot_be_is_refused(browser, deployment, page):
    address = reverse(f"admin:{page}_changelist")
    selected = {"action": "delete_selected", "_selected_action": "x"}
    assert browser.post(address, selected).status_code == 400
    assert browser.get(address, {"name__exact": "a\0b"}).status_code == 400


@pytest.mark.parametrize("field", ["cloud_providers", "instance_types", "on_prem_node_ids"])
def test_lists_of_names_take_no_nul(browser, deployment, field):
    form = {"name": "other", "version": deployment.version.pk, field: "a\0b"}
    assert "Null characters are not allowed." in browser.post(url("deployment", "add"), form).content.decode()


def test_a_chat_template_that_never_ends_is_refused(browser, deployment):
    form = {"name": "other", "version": deployment.version.pk, "chat_template": "{{ 'x'|center(10**12) }}"}
    page = browser.post(url("deployment", "add"), form).content.decode()
    assert "This is no template that can be used: it takes too long or too much memory." in page


def test_a_key_whose_id_has_a_nul_is_not_there(browser, db, monkeypatch):
    """PostgreSQL cannot compare with NUL, so it is not asked."""
    asked = []
    monkeypatch.setattr(ApiKeyAdmin, "get_queryset", lambda *arguments: asked.append(1) or ApiKey.objects.all())
    assert browser.get(url("apikey", "change", "a\0b")).status_code == 302
    assert not asked


def test_an_adapter_that_is_removed_while_its_page_is_made(browser, deployment):
    """Rows and their versions are read one after the other."""
    removed = Adapter.objects.create(name="removed", deployment=deployment)
    assert browser.get(url("adapter")).status_code == 200
    assert browser.get(url("adapter", "change", removed.pk)).status_code == 302
    assert browser.get(url("adapter", "roll_back", removed.pk)).status_code == 404
