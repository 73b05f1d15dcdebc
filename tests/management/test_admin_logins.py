"""The admin's door: logins cannot be guessed or stolen, and every answer has the headers and cookies that protect it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.urls import reverse

from management.protection import ATTEMPTS_PER_ADDRESS, ATTEMPTS_PER_ADDRESS_AND_USER
from tests.conftest import ROOT


@pytest.fixture
def browser(admin_client):
    return admin_client


def url(page, action="changelist", *args):
    return reverse(f"admin:management_{page}_{action}", args=args)


def log_in(client, password, username="admin", **extra):
    body = {"username": username, "password": password}
    return client.post(reverse("admin:login") + "?next=/admin/", body, **extra)


@pytest.fixture
def no_tries():
    cache.clear()
    yield
    cache.clear()


def test_passwords_cannot_be_guessed_for_long(client, admin_user, no_tries):
    for _ in range(ATTEMPTS_PER_ADDRESS_AND_USER):
        assert log_in(client, "wrong").status_code == 200  # the form again
    refused = log_in(client, "password")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    # nobody else is kept out by that: not the user from another address, not another user
    assert log_in(client, "password", REMOTE_ADDR="10.0.0.2").status_code == 302
    User.objects.create_superuser("second", password="second-password")
    assert log_in(client, "second-password", "second").status_code == 302


def test_other_characters_for_the_same_name_count_for_it(client, admin_user, no_tries):
    names = ["admin", "\uff41dmin", "a\uff44min", "ad\uff4din", "adm\uff49n"]
    assert len(names) == ATTEMPTS_PER_ADDRESS_AND_USER
    for name in names:
        assert log_in(client, "wrong", name).status_code == 200
    assert log_in(client, "password").status_code == 429


def test_clients_by_ipv4_of_a_socket_for_both_are_told_apart(client, admin_user, no_tries):
    for _ in range(ATTEMPTS_PER_ADDRESS_AND_USER + 1):
        last = log_in(client, "wrong", REMOTE_ADDR="::ffff:10.0.0.1")
    assert last.status_code == 429
    assert log_in(client, "password", REMOTE_ADDR="::ffff:10.0.0.2").status_code == 302
    for host in range(ATTEMPTS_PER_ADDRESS_AND_USER + 1):  # which has a whole network
        last = log_in(client, "wrong", REMOTE_ADDR=f"2001:db8::{host}")
    assert last.status_code == 429


@pytest.mark.full
def test_one_address_cannot_try_many_users(client, admin_user, no_tries):
    statuses = [log_in(client, "wrong", f"user{number}").status_code for number in range(ATTEMPTS_PER_ADDRESS + 1)]
    assert statuses == [200] * ATTEMPTS_PER_ADDRESS + [429]


def test_who_gets_in_starts_anew(client, admin_user, no_tries):
    for _ in range(2):
        for _ in range(ATTEMPTS_PER_ADDRESS_AND_USER - 1):
            log_in(client, "wrong")
        assert log_in(client, "password").status_code == 302


def test_addresses_behind_a_proxy_are_told_apart(client, admin_user, no_tries, settings):
    settings.BEHIND_TLS = True
    for _ in range(ATTEMPTS_PER_ADDRESS_AND_USER + 1):
        last = log_in(client, "wrong", HTTP_X_FORWARDED_FOR="1.1.1.1, 10.0.0.3")
    assert last.status_code == 429
    assert log_in(client, "password", HTTP_X_FORWARDED_FOR="10.0.0.3, 10.0.0.4").status_code == 302


def test_pages_say_what_they_may_load(browser, client, deployment):
    for page in (browser.get(url("deployment")), client.get(reverse("admin:login"))):
        policy = page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "'unsafe-inline'" not in policy.split("script-src", 1)[1].split(";")[0]
        # what the policy would not run is not there
        text = page.content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*type=\"application/json)[^>]*>", text)
        assert not re.search(r"\son(click|change|load|submit|input)=", text)
        assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text.replace('href="https://', ""))


def test_every_answer_has_the_headers_that_protect_it(browser, client, deployment):
    missing = client.get("/admin/nothing/")
    for answer in (browser.get("/admin/"), browser.get(url("deployment")), client.get(reverse("admin:login")), missing,
                   client.get("/sg_inf/list"), client.get("/sg_inf/nothing/at/all")):  # fmt: skip
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    for page in (browser.get("/admin/"), client.get(reverse("admin:login"))):
        assert "no-store" in page.headers["cache-control"]


def test_cookies_cannot_be_read_or_sent_by_other_sites(client, admin_user, no_tries):
    client.get(reverse("admin:login"))
    assert log_in(client, "password").status_code == 302
    cookies = client.cookies
    assert {cookies[name]["samesite"] for name in ("sessionid", "csrftoken")} == {"Strict"}
    assert cookies["sessionid"]["httponly"]


def test_a_stolen_session_from_before_the_login_is_worth_nothing(client, admin_user, no_tries):
    """Session fixation: logging in makes a new session."""
    client.get(reverse("admin:login"))
    session = client.session
    session["kept"] = 1
    session.save()
    before = session.session_key
    client.cookies["sessionid"] = before
    assert log_in(client, "password").status_code == 302
    assert client.cookies["sessionid"].value != before


def test_cookies_are_secure_behind_tls():
    script = (
        "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'config.settings'; django.setup();"
        "from django.conf import settings as s;"
        "print(s.SESSION_COOKIE_SECURE, s.CSRF_COOKIE_SECURE, s.SECURE_PROXY_SSL_HEADER)"
    )
    environment = {**os.environ, "DRAGOMAN_BEHIND_TLS": "true"}
    told = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.strip() == "True True ('HTTP_X_FORWARDED_PROTO', 'https')", told.stderr
