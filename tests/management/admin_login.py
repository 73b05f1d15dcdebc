"""A browser's client that has logged in to the admin of a running server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx


def log_in(address: str, data_dir: Path, timeout_s: float = 60) -> httpx.Client:
    """Log in as the first admin; the client keeps its cookies."""
    browser = httpx.Client(base_url=address, timeout=timeout_s, follow_redirects=True)
    form = browser.get("/admin/login/").text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token is not None
    page = browser.post(
        "/admin/login/?next=/admin/",
        data={"username": "admin", "password": (data_dir / "admin-password").read_text().strip(),
              "csrfmiddlewaretoken": token[1]},
        headers={"referer": f"{address}/admin/login/"},
    )  # fmt: skip
    assert page.status_code == 200
    assert "sessionid" in browser.cookies
    return browser
