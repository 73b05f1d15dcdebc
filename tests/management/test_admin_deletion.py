"""Deletion in the admin: services say what may go, and what goes with it."""

from __future__ import annotations

import datetime
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from django.utils import timezone

from management.models import ApiKey, AuditEvent, Deployment, Model, Node, Worker
from management.services.deployments import change_deployment, delete_deployment
from management.services.errors import RegistryError
from management.services.keys import create_key
from management.services.models import register_model, remove_model


def url(page, action="changelist", *args):
    return reverse(f"admin:management_{page}_{action}", args=args)


@pytest.fixture
def used(deployment):
    """A deployment that has had a worker and has a key of its own, as one that ScaleGenAI's API makes."""
    Worker.objects.create(
        deployment=deployment, version=deployment.version, index=0, epoch=1, state="exited", address="x"
    )
    create_key("endpoint", ["infer"], "tester", deployment=deployment)
    return deployment


def delete_selected(browser, page, *rows):
    chosen = {"action": "delete_selected", "_selected_action": [row.pk for row in rows], "post": "yes"}
    return unescape(browser.post(url(page), chosen, follow=True).content.decode())


def test_a_deployment_with_workers_and_keys_is_deleted_and_its_records_stay(admin_client, used):
    asked = unescape(admin_client.get(url("deployment", "delete", used.pk)).content.decode())
    assert "Are you sure" in asked
    assert "Worker" not in asked[asked.index("Are you sure") :]
    answer = admin_client.post(url("deployment", "delete", used.pk), {"post": "yes"}, follow=True)
    assert answer.status_code == 200
    used.refresh_from_db()
    assert used.deleted
    assert (Worker.objects.count(), ApiKey.objects.get().revoked) == (1, True)


def test_selected_deployments_are_deleted(admin_client, used):
    assert "Successfully deleted 1 deployment" in delete_selected(admin_client, "deployment", used)
    used.refresh_from_db()
    assert used.deleted


def test_who_may_delete_deployments_alone_may_do_so(client, used):
    clerk = User.objects.create_user("clerk", password="a-long-password", is_staff=True)
    clerk.user_permissions.set(Permission.objects.filter(codename__in=["view_deployment", "delete_deployment"]))
    client.force_login(clerk)
    assert client.post(url("deployment", "delete", used.pk), {"post": "yes"}).status_code == 302
    used.refresh_from_db()
    assert used.deleted


def test_a_model_goes_with_the_records_of_its_deleted_deployments(admin_client, used):
    delete_deployment(used, "tester")
    admin_client.post(url("model", "delete", used.version.model_id), {"post": "yes"})
    assert not Model.objects.exists()
    assert not Deployment.objects.exists()


def test_a_model_in_use_stays_and_the_page_says_why(admin_client, used):
    model = used.version.model
    page = unescape(admin_client.post(url("model", "delete", model.pk), {"post": "yes"}, follow=True).content.decode())
    assert "demo has deployments; remove them first" in page
    assert "deleted successfully" not in page
    assert Model.objects.exists()
    assert not LogEntry.objects.exists()


def test_of_selected_models_none_is_removed_if_one_is_refused(admin_client, used):
    unused = register_model("alone", "/models/alone", "tester").model
    page = delete_selected(admin_client, "model", unused, used.version.model)
    assert "demo has deployments; remove them first" in page
    assert "Successfully" not in page
    assert Model.objects.count() == 2
    assert not LogEntry.objects.exists()


def test_a_model_whose_version_a_worker_still_has_stays(deployment):
    """After a change of the deployment's version, until the worker is replaced."""
    model = deployment.version.model
    worker = Worker.objects.create(
        deployment=deployment, version=deployment.version, index=0, epoch=1, state="ready", address="x"
    )
    change_deployment(deployment, "tester", version=register_model("other", "/models/other", "tester"))
    with pytest.raises(RegistryError, match="remove them first"):
        remove_model(model, "tester")
    Worker.objects.update(state="exited")
    remove_model(model, "tester")
    assert not Worker.objects.filter(pk=worker.pk).exists()
    with pytest.raises(RegistryError, match="demo is removed"):
        remove_model(model, "another")


def test_a_machine_that_has_gone_is_removed_and_one_that_is_there_stays(admin_client, deployment):
    long_ago = timezone.now() - datetime.timedelta(hours=1)
    gone, busy = (Node.objects.create(name=name, seen_at=long_ago) for name in ("gone", "busy"))
    reporting = Node.objects.create(name="reporting", seen_at=timezone.now())
    Worker.objects.create(
        deployment=deployment, version=deployment.version, index=0, epoch=1, state="ready", address="x", node="busy"
    )
    for node in (busy, reporting):
        page = admin_client.post(url("node", "delete", node.pk), {"post": "yes"}, follow=True)
        assert f"{node.name} is there" in unescape(page.content.decode())
    admin_client.post(url("node", "delete", gone.pk), {"post": "yes"})
    assert set(Node.objects.values_list("name", flat=True)) == {"busy", "reporting"}
    assert AuditEvent.objects.first().action == "node.remove"
