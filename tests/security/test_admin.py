"""Attacks on the admin: users who want more rights, names that are scripts, forged forms, and sockets that outlive a login."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from channels.db import database_sync_to_async
from channels.testing import WebsocketCommunicator
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.contrib.staticfiles import finders
from django.test import Client
from django.urls import reverse

from management.models import ApiKey, AuditEvent, Deployment, Worker
from management.services.deployments import create_deployment
from management.services.keys import create_key
from management.services.models import register_model
from management.status import StatusConsumer

SCRIPT = "<img src=x onerror=alert(1)>"
REGISTRIES = sorted(admin.site._registry, key=lambda model: model.__name__)


def staff(*permissions: str) -> Client:
    """A browser of a staff user with these permissions alone."""
    user = User.objects.create_user("clerk", password="a-long-password", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def pages(model, pk: object = 1) -> list[str]:
    options = model._meta
    name = f"admin:{options.app_label}_{options.model_name}"
    return [
        reverse(f"{name}_changelist"),
        reverse(f"{name}_add"),
        *(reverse(f"{name}_{page}", args=[pk]) for page in ("change", "delete", "history")),
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("model", REGISTRIES, ids=lambda model: model.__name__)
def test_staff_without_permissions_sees_and_changes_nothing(model, deployment):
    create_key("a key", ["infer"], "t")
    Group.objects.create(name="a group")
    client = staff()
    row = model.objects.first()
    before = {each: each.objects.count() for each in apps.get_models() if each.__name__ not in ("Session", "LogEntry")}
    refused = (403,) if row else (302, 403)  # what is not there may also lead back to the index
    for page in pages(model, row.pk if row else 1):
        assert client.get(page).status_code in refused, page
        chosen = {"action": "delete_selected", "_selected_action": "1", "post": "yes"}
        assert client.post(page, chosen).status_code in refused, page
    assert {each: each.objects.count() for each in before} == before


@pytest.mark.django_db
@pytest.mark.parametrize("model", REGISTRIES, ids=lambda model: model.__name__)
def test_who_may_look_may_not_touch(model, deployment):
    client = staff(*(f"view_{each._meta.model_name}" for each in REGISTRIES))
    listed, added, *others = pages(model)
    assert client.get(listed).status_code == 200
    assert client.post(added, {}).status_code == 403
    rows = list(model.objects.values_list("pk", flat=True))
    for page in others[:2]:
        assert client.post(page, {"post": "yes"}).status_code in (302, 403)
    chosen = {"action": "delete_selected", "_selected_action": [str(pk) for pk in rows], "post": "yes"}
    client.post(listed, chosen)
    assert list(model.objects.values_list("pk", flat=True)) == rows


@pytest.mark.django_db
def test_the_buttons_of_a_row_need_their_permission(deployment):
    """Every URL of the admin, with each of its rows, as a user who may look at everything."""
    client = staff(*(f"view_{each._meta.model_name}" for each in REGISTRIES))
    before = list(Deployment.objects.values())
    events = AuditEvent.objects.count()
    tried = 0
    for model, page in admin.site._registry.items():
        for pattern in page.get_urls():
            looks = pattern.name is not None and pattern.name.endswith("_history")
            if looks or pattern.name is None or "object_id" not in str(pattern.pattern):
                continue
            row = model.objects.first()
            address = reverse(f"admin:{pattern.name}", kwargs={"object_id": row.pk if row else "1"})
            assert client.post(address, {"post": "yes"}).status_code in (302, 403, 404), address
            tried += 1
    assert tried > 20
    assert list(Deployment.objects.values()) == before
    assert AuditEvent.objects.count() == events


@pytest.mark.django_db
def test_nobody_makes_a_superuser_but_a_superuser(admin_user):
    """Whoever may change users may neither raise themselves, nor take over who has more rights."""
    client = staff("view_user", "add_user", "change_user", "delete_user", "view_group", "add_group", "change_group")
    clerk = User.objects.get(username="clerk")
    group = Group.objects.create(name="all")
    permission = Permission.objects.get(codename="delete_deployment")
    raised = {"username": "clerk", "is_active": "on", "is_staff": "on", "is_superuser": "on", "groups": [group.pk],
              "user_permissions": [permission.pk], "date_joined_0": "2020-01-01", "date_joined_1": "00:00:00"}  # fmt: skip
    client.post(reverse("admin:auth_user_change", args=[clerk.pk]), raised)
    new = {"username": "second", "password1": "a-long-password", "password2": "a-long-password",
           "usable_password": "true", **{k: raised[k] for k in ("is_superuser", "is_staff", "user_permissions")}}  # fmt: skip
    client.post(reverse("admin:auth_user_add"), new)
    for user in User.objects.exclude(pk=admin_user.pk):
        assert not user.is_superuser
        assert not user.groups.exists()
        assert not user.user_permissions.filter(codename="delete_deployment").exists()
    assert not User.objects.filter(username="second", is_staff=True).exists()
    for page in ("auth_user_change", "auth_user_password_change", "auth_user_delete"):
        body = {"password1": "another-password", "password2": "another-password", "post": "yes", "username": "taken"}
        assert client.post(reverse(f"admin:{page}", args=[admin_user.pk]), body).status_code in (302, 403, 404)
    chosen = {"action": "delete_selected", "_selected_action": [str(admin_user.pk)], "post": "yes"}
    client.post(reverse("admin:auth_user_changelist"), chosen)
    found = User.objects.get(pk=admin_user.pk)
    assert (found.username, found.check_password("password")) == ("admin", True)
    refused = client.post(
        reverse("admin:auth_group_change", args=[group.pk]), {"name": "all", "permissions": [permission.pk]}
    )
    assert refused.status_code == 403
    assert not group.permissions.exists()


@pytest.mark.django_db
def test_a_key_that_manages_is_made_by_superusers_alone(admin_client):
    """Whoever may add keys could otherwise create and delete deployments with one."""
    address, client = reverse("admin:management_apikey_add"), staff("view_apikey", "add_apikey", "change_apikey")
    assert 'value="manage"' not in client.get(address).content.decode()
    wanted = {"name": "mine", "scopes": ["infer", "manage"], "expiry_date_0": "", "expiry_date_1": ""}
    assert "manage is no scope that you may give" in client.post(address, wanted).content.decode()
    assert not ApiKey.objects.exists()
    client.post(address, wanted | {"scopes": ["infer", "metrics"]})
    (key,) = ApiKey.objects.all()
    assert key.scopes == ["infer", "metrics"]
    client.post(reverse("admin:management_apikey_change", args=[key.pk]), wanted)
    key.refresh_from_db()
    assert key.scopes == ["infer", "metrics"]
    assert 'value="manage"' in admin_client.get(address).content.decode()
    admin_client.post(address, wanted)
    managing = ApiKey.objects.get(scopes=["infer", "manage"])
    assert client.post(reverse("admin:management_apikey_change", args=[managing.pk]), wanted).status_code == 403


@pytest.mark.django_db
@pytest.mark.parametrize("active", [True, False])
def test_nobody_takes_over_a_user_with_more_rights(active):
    """Not even one who is not active, and whom the same form would make so."""
    client = staff("view_user", "change_user", "delete_user")
    equal = User.objects.create_user("equal", password="a-long-password", is_staff=True)
    more = User.objects.create_user("more", password="a-long-password", is_staff=True, is_active=active)
    more.groups.add(Group.objects.create(name="operators"))
    Group.objects.get().permissions.add(Permission.objects.get(codename="operate_deployment"))
    body = {"password1": "another-password", "password2": "another-password", "usable_password": "true"}
    for user, status, taken in ((equal, 302, True), (more, 403, False)):
        address = reverse("admin:auth_user_password_change", args=[user.pk])
        assert client.post(address, body).status_code == status
        user.refresh_from_db()
        assert user.check_password("another-password") == taken
    assert client.post(reverse("admin:auth_user_change", args=[more.pk]), {"username": "taken"}).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [str(more.pk)], "post": "yes"}
    client.post(reverse("admin:auth_user_changelist"), chosen)
    assert User.objects.filter(username="more").exists()


@pytest.mark.django_db
def test_names_are_shown_as_text(admin_client, deployment):
    """Names and texts that others chose: an error, a key, a user, an event, a model's path."""
    Deployment.objects.update(reason=SCRIPT, state="failed", observed_generation=1)
    Worker.objects.create(deployment=deployment, version=deployment.version, index=0, epoch=1, state="failed", reason=SCRIPT,
                          address="x")  # fmt: skip
    create_key(SCRIPT, ["infer"], SCRIPT)
    User.objects.create_user(SCRIPT)
    AuditEvent.objects.create(actor=SCRIPT, action="x", target=SCRIPT, details={"name": SCRIPT})
    register_model("odd", f"/models/{SCRIPT}", SCRIPT)
    shown = 0
    for model in REGISTRIES:
        page = admin_client.get(pages(model)[0]).content.decode()
        shown += page.count("&lt;img")
        assert SCRIPT not in page, model
        row = model.objects.order_by("-pk").first()
        if row is not None:
            assert SCRIPT not in admin_client.get(pages(model, row.pk)[2], follow=True).content.decode(), model
    assert shown >= 6
    assert SCRIPT not in admin_client.get(reverse("admin:management_model_changelist"), {"q": SCRIPT}).content.decode()


def test_the_page_that_shows_live_states_writes_no_html():
    """What comes over the socket is put into the page as text."""
    text = Path(finders.find("management/live_status.js")).read_text()
    assert "textContent" in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


@pytest.mark.django_db
def test_a_forged_form_of_another_site_changes_nothing(admin_user, deployment):
    """With the user's cookie, and with or without a token of the forger's own."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin_user)
    before = list(Deployment.objects.values())
    addresses = [
        reverse(f"admin:{pattern.name}", kwargs={"object_id": deployment.pk})
        for pattern in admin.site._registry[Deployment].get_urls()
        if pattern.name and "object_id" in str(pattern.pattern)
    ]
    for address in addresses:
        for body in ({"post": "yes"}, {"post": "yes", "csrfmiddlewaretoken": "a" * 64}):
            assert client.post(address, body, HTTP_ORIGIN="https://evil.example").status_code == 403, address
    assert list(Deployment.objects.values()) == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("change", [{"is_staff": False}, {"is_active": False}])
async def test_a_socket_ends_with_its_users_rights(change):
    def rows() -> User:
        create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester")
        user = User.objects.create_user("staff", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename="view_deployment"))
        return user

    user = await database_sync_to_async(rows)()
    socket = WebsocketCommunicator(StatusConsumer.as_asgi(), "/ws/status")
    socket.scope["user"] = user
    assert (await socket.connect())[0]
    assert (await socket.receive_json_from(5))["deployments"]
    await database_sync_to_async(lambda: User.objects.filter(pk=user.pk).update(**change))()
    while (message := await socket.receive_output(5))["type"] == "websocket.send":
        assert json.loads(message["text"])
    assert (message["type"], message["code"]) == ("websocket.close", 4403)


@pytest.mark.django_db(transaction=True)
async def test_a_socket_ends_with_its_session():
    class Session:
        session_key = "a"

        def __init__(self) -> None:
            self.there = True

        def exists(self, key: str) -> bool:
            return self.there

    user = await database_sync_to_async(lambda: User.objects.create_user("staff", is_staff=True))()
    session = Session()
    socket = WebsocketCommunicator(StatusConsumer.as_asgi(), "/ws/status")
    socket.scope |= {"user": user, "session": session}
    assert (await socket.connect())[0]
    await socket.receive_json_from(5)
    session.there = False
    while (message := await socket.receive_output(5))["type"] == "websocket.send":
        pass
    assert message["code"] == 4403
