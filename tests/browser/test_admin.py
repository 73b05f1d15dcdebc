"""The admin's pages in a browser: each loads, shows what it is for, and its scripts run without an error."""

from __future__ import annotations

import pytest
from django.contrib import admin as django_admin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from management.models import ApiKey, Deployment
from tests.waiting import wait_until

PAGES = {model: f"/admin/{model._meta.app_label}/{model._meta.model_name}/" for model in django_admin.site._registry}


def errors(browser) -> list[str]:
    """What the browser's console has said since the last look: scripts that failed, files that did not come."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def covered(browser) -> bool:
    """Whether a layer lies over the middle of the page, as the theme's do when its scripts have failed."""
    return browser.execute_script(
        "const found = document.elementFromPoint(innerWidth / 2, innerHeight / 2);"
        "return Boolean(found.closest('.fixed.inset-0, #modal-overlay'))"
    )


def open_page(browser, address: str) -> None:
    """Go there, and see that the page works."""
    browser.get(address)
    assert errors(browser) == [], address
    assert not covered(browser), address


def links(browser, below: str) -> set[str]:
    """The addresses below `below` that the page leads to, without their queries."""
    found = browser.execute_script("return [...document.querySelectorAll('a[href]')].map(link => link.href)")
    return {address.partition("?")[0].partition("#")[0] for address in found if address.startswith(below)}


def create_key(browser, server, name: str) -> str:
    """Fill in the form of a new key; returns the key's text from the page that follows."""
    browser.get(f"{server.admin_url}/admin/management/apikey/add/")
    browser.find_element(By.NAME, "name").send_keys(name)
    browser.find_element(By.NAME, "_save").click()
    wait_until(lambda: browser.find_elements(By.ID, "new-key"), explain=lambda: browser.page_source)
    return browser.find_element(By.ID, "new-key").get_attribute("value")


def test_the_login_page_leads_to_the_overview(admin):
    assert "Site administration" in admin.title
    assert errors(admin) == []


def test_a_deployments_page_is_reached_from_the_list(admin, running_server):
    open_page(admin, running_server.admin_url + PAGES[Deployment])
    admin.find_element(By.LINK_TEXT, "demo").click()
    wait_until(lambda: admin.current_url.endswith("/change/"))
    assert "demo" in admin.title
    assert errors(admin) == []


@pytest.mark.parametrize("model", PAGES, ids=lambda model: model._meta.model_name)
def test_each_page_of_a_registry_opens(admin, running_server, model):
    """The list, the form of a new row, and what they lead to: of the rows, every page and button of the last one."""
    if model is ApiKey:
        create_key(admin, running_server, "any")
    listed = running_server.admin_url + PAGES[model]
    open_page(admin, listed)
    assert f"Select {model._meta.verbose_name} to" in admin.title
    left, seen = links(admin, listed), {listed}
    rows = {address.removeprefix(listed).partition("/")[0] for address in left} - {"", "add", "csv"}
    while left - seen:
        address = min(left - seen)
        seen.add(address)
        if address.removeprefix(listed).partition("/")[0] in rows - {max(rows, default="")}:
            continue
        open_page(admin, address)
        left |= links(admin, listed)
    assert not rows or any(address.endswith("/history/") for address in seen)


def test_a_key_is_shown_once_used_and_revoked_by_keyboard(admin, running_server):
    text = create_key(admin, running_server, "alice")
    assert errors(admin) == []
    assert not covered(admin)
    assert text not in str(admin.get_cookies())
    assert running_server.get("/v1/models", headers={"authorization": f"Bearer {text}"}).status_code == 200
    open_page(admin, running_server.admin_url + PAGES[ApiKey])
    assert text not in admin.page_source
    admin.find_element(By.LINK_TEXT, "alice").send_keys(Keys.ENTER)
    wait_until(lambda: admin.current_url.endswith("/change/"))
    admin.find_element(By.PARTIAL_LINK_TEXT, "Revoke").send_keys(Keys.ENTER)
    wait_until(lambda: "Revoke the key alice?" in admin.page_source)
    admin.find_element(By.XPATH, "//button[normalize-space()='Yes']").send_keys(Keys.ENTER)
    wait_until(lambda: "alice is revoked" in admin.page_source, explain=lambda: admin.page_source)
    assert errors(admin) == []


def test_the_menu_of_a_row_opens_by_keyboard(admin, running_server):
    open_page(admin, running_server.admin_url + PAGES[Deployment])
    button = admin.find_element(By.CSS_SELECTOR, "button[aria-label='More actions']")
    button.send_keys(Keys.ENTER)
    wait_until(lambda: [link for link in admin.find_elements(By.PARTIAL_LINK_TEXT, "Stop") if link.is_displayed()])
    assert button.get_attribute("aria-expanded") == "true"


def test_a_wrong_password_is_told(chromium, running_server):
    chromium.delete_all_cookies()
    chromium.get(f"{running_server.admin_url}/admin/login/")
    chromium.find_element(By.NAME, "username").send_keys("admin")
    chromium.find_element(By.NAME, "password").send_keys("wrong")
    chromium.find_element(By.CSS_SELECTOR, "button[type=submit]").click()
    wait_until(lambda: "Please enter the correct username" in chromium.page_source)
    assert "/admin/login/" in chromium.current_url
