"""A real browser without a window: Debian's Chromium, driven by its ChromeDriver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.requirements import need
from tests.waiting import wait_until

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900")
"""Without its sandbox, since tests may run as root."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests of this process."""
    need("Chromium")
    need("ChromeDriver")
    options = webdriver.ChromeOptions()
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(shutil.which("chromium"))
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.set_page_load_timeout(120)
        yield browser


@pytest.fixture
def admin(chromium, running_server) -> webdriver.Chrome:
    """The browser, logged in as the first admin by the login page's own form."""
    chromium.delete_all_cookies()
    chromium.get(f"{running_server.admin_url}/admin/login/")
    password = (running_server.data_dir / "admin-password").read_text().strip()
    chromium.find_element(By.NAME, "username").send_keys("admin")
    chromium.find_element(By.NAME, "password").send_keys(password)
    chromium.find_element(By.CSS_SELECTOR, "button[type=submit]").click()
    wait_until(
        lambda: chromium.current_url == f"{running_server.admin_url}/admin/", explain=lambda: chromium.page_source
    )
    chromium.get_log("browser")  # what came before the test
    return chromium
