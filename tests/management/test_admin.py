"""The admin: every page opens, buttons call the services, and nobody gets in without logging in."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from management.models import ApiKey, AuditEvent, Deployment, Model, Worker
from management.services.deployments import start_deployment

PAGES = ["deployment", "worker", "model", "adapter", "apikey", "auditevent"]


@pytest.fixture
def browser(admin_client):
    return admin_client


def url(page, action="changelist", *args):
    return reverse(f"admin:management_{page}_{action}", args=args)


@pytest.mark.parametrize("page", PAGES)
def test_lists_open(browser, deployment, page):
    assert browser.get(url(page)).status_code == 200


@pytest.mark.parametrize("page", PAGES)
def test_strangers_are_sent_to_log_in(client, db, page):
    answer = client.get(url(page))
    assert answer.status_code == 302
    assert "/admin/login/" in answer["location"]


def test_an_operator_sees_state_and_reason(browser, deployment):
    Deployment.objects.update(state="failed", reason="config.json is missing")
    Worker.objects.create(
        deployment=deployment,
        version=deployment.version,
        index=0,
        epoch=1,
        state="failed",
        reason="killed by signal 9",
        socket="x",
    )
    page = browser.get(url("deployment")).content.decode()
    assert "config.json is missing" in page
    assert "Failed" in page
    assert "live_status.js" in page
    assert "killed by signal 9" in browser.get(url("worker")).content.decode()


def test_start_and_stop(browser, deployment):
    for action, replicas in (("start", 1), ("stop", 0)):
        answer = browser.get(url("deployment", action, deployment.pk), follow=True)
        assert answer.status_code == 200
        deployment.refresh_from_db()
        assert deployment.replicas == replicas
        assert AuditEvent.objects.first().action == f"deployment.{action}"
        assert AuditEvent.objects.first().actor == "admin:admin"


def test_viewers_cannot_operate(client, deployment):
    viewer = User.objects.create_user("viewer", password="secret-enough", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_deployment"))
    client.force_login(viewer)
    assert client.get(url("deployment")).status_code == 200
    assert client.get(url("deployment", "start", deployment.pk)).status_code == 403
    deployment.refresh_from_db()
    assert deployment.replicas == 0


def test_register_a_model_and_deploy_it(browser):
    answer = browser.post(url("model", "add"), {
        "name": "org/new", "kind": "llm", "source": "/models/new",
        "versions-TOTAL_FORMS": 0, "versions-INITIAL_FORMS": 0,
    }, follow=True)  # fmt: skip
    assert answer.status_code == 200
    version = Model.objects.get(name="org/new").versions.get()
    assert version.source == "/models/new"
    body = {"name": "new", "version": version.pk, "engine_options": '{"max_num_seqs": 0}'}
    assert "max_num_seqs must be between" in browser.post(url("deployment", "add"), body).content.decode()
    browser.post(url("deployment", "add"), {**body, "engine_options": '{"max_num_seqs": 8}'})
    assert Deployment.objects.get(name="new").engine_options == {"max_num_seqs": 8}


def test_a_reserved_name_is_refused_at_its_field(browser, deployment):
    body = {"name": "tgi", "version": deployment.version_id, "engine_options": "{}"}
    assert "always means the default" in browser.post(url("deployment", "add"), body).content.decode()
    assert browser.get(url("deployment", "start", 999)).status_code == 404


def test_a_bad_adapter_is_refused_at_its_field(browser, deployment):
    body = {"name": "a", "model": deployment.version.model_id, "source": "/nowhere"}
    assert "adapter_config.json is missing" in browser.post(url("adapter", "add"), body).content.decode()


def test_a_running_deployment_is_not_deleted(browser, deployment):
    start_deployment(deployment, "tester")
    answer = browser.post(url("deployment", "delete", deployment.pk), {"post": "yes"}, follow=True)
    assert "stop it first" in answer.content.decode()
    assert Deployment.objects.exists()


def test_a_key_is_shown_once_and_can_be_revoked(browser):
    body = {"name": "ci", "scopes": ["infer"], "expiry_date_0": "", "expiry_date_1": ""}
    page = browser.post(url("apikey", "add"), body, follow=True).content.decode()
    key = ApiKey.objects.get()
    text = re.search(rf"shown only now: ({key.prefix}\.\w+)", page)[1]
    assert ApiKey.objects.is_valid(text)
    assert text not in browser.get(url("apikey")).content.decode()
    browser.get(url("apikey", "revoke", key.pk), follow=True)
    key.refresh_from_db()
    assert key.revoked


def test_audit_events_cannot_be_touched(browser, deployment):
    event = AuditEvent.objects.first()
    assert browser.post(url("auditevent", "delete", event.pk), {"post": "yes"}).status_code == 403
    assert browser.get(reverse("admin:management_auditevent_add")).status_code == 403
