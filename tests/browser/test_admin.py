"""The admin's pages in a browser: each loads, shows what it is for, and its scripts run without an error."""

from __future__ import annotations

import pytest
from django.contrib import admin as django_admin
from selenium.webdriver.common.by import By

from tests.waiting import wait_until

PAGES = {model: f"/admin/{model._meta.app_label}/{model._meta.model_name}/" for model in django_admin.site._registry}


def errors(browser) -> list[str]:
    """What the browser's console has said since the last look: scripts that failed, files that did not come."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_login_page_leads_to_the_overview(admin):
    assert "Site administration" in admin.title
    assert errors(admin) == []


def test_a_deployments_page_is_reached_from_the_list(admin, running_server):
    admin.get(running_server.admin_url + "/admin/management/deployment/")
    admin.find_element(By.LINK_TEXT, "demo").click()
    wait_until(lambda: admin.current_url.endswith("/change/"))
    assert "demo" in admin.title
    assert errors(admin) == []


@pytest.mark.parametrize("model", PAGES, ids=lambda model: model._meta.model_name)
def test_each_list_opens(admin, running_server, model):
    admin.get(running_server.admin_url + PAGES[model])
    assert f"Select {model._meta.verbose_name} to" in admin.title
    assert errors(admin) == []


def test_a_wrong_password_is_told(chromium, running_server):
    chromium.delete_all_cookies()
    chromium.get(f"{running_server.admin_url}/admin/login/")
    chromium.find_element(By.NAME, "username").send_keys("admin")
    chromium.find_element(By.NAME, "password").send_keys("wrong")
    chromium.find_element(By.CSS_SELECTOR, "button[type=submit]").click()
    wait_until(lambda: "Please enter the correct username" in chromium.page_source)
    assert "/admin/login/" in chromium.current_url
