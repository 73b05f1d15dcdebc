"""The admin: every page opens, buttons call the services, and nobody gets in without logging in."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import IntegrityError
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from engine.config import OPTIONS
from management.models import Adapter, AdapterVersion, ApiKey, AuditEvent, Deployment, Model, Worker
from management.services import adapters, keys
from management.services.deployments import start_deployment
from management.services.errors import RegistryError
from management.services.keys import change_key, create_key, revoke_key
from management.snapshot import KeyLimits
from tests.conftest import ROOT

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
    Deployment.objects.update(state="failed", observed_generation=1, reason="config.json is missing")
    Worker.objects.create(
        deployment=deployment,
        version=deployment.version,
        index=0,
        epoch=1,
        state="failed",
        reason="killed by signal 9",
        address="x",
    )
    page = browser.get(url("deployment")).content.decode()
    assert "config.json is missing" in page
    assert "Failed" in page
    assert "live_status.js" in page
    assert "killed by signal 9" in browser.get(url("worker")).content.decode()


def test_start_and_stop(browser, deployment):
    for action, replicas in (("start", 1), ("stop", 0)):
        before = deployment.replicas
        page = browser.get(url("deployment", action, deployment.pk))
        assert "csrfmiddlewaretoken" in page.content.decode()
        deployment.refresh_from_db()
        assert deployment.replicas == before  # following a link changes nothing
        answer = browser.post(url("deployment", action, deployment.pk), follow=True)
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
    assert client.post(url("deployment", "start", deployment.pk)).status_code == 403
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
    body = {"name": "new", "version": version.pk}
    browser.post(url("deployment", "add"), {**body, "max_num_seqs": 8, "dtype": "", "prefix_caching": "False"})
    assert Deployment.objects.get(name="new").engine_options == {"max_num_seqs": 8, "prefix_caching": False}


def test_every_engine_option_has_a_field_with_its_meaning_and_bounds(browser, deployment):
    page = browser.get(url("deployment", "change", deployment.pk)).content.decode()
    for name, field in OPTIONS.items():
        assert f'name="{name}"' in page, name
        assert escape(field.option.description) in page, name
        if field.type is int:
            tag = re.search(rf'<input[^>]*name="{name}"[^>]*>', page)[0]
            assert f'min="{field.option.minimum}"' in tag, name
            assert f'max="{field.option.maximum}"' in tag, name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 0}, "greater than or equal to 1"),
        ({"max_num_seqs": "many"}, "Enter a whole number"),
        ({"dtype": "int3"}, "Select a valid choice"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "at least max_num_seqs"),
    ],
)
def test_options_that_no_engine_accepts_are_refused(browser, deployment, options, text):
    body = {"name": "demo", "version": deployment.version_id, **options}
    assert text in browser.post(url("deployment", "change", deployment.pk), body).content.decode()
    deployment.refresh_from_db()
    assert deployment.engine_options == {}


def test_options_are_shown_as_stored_and_an_empty_field_is_the_default(browser, deployment):
    Deployment.objects.update(engine_options={"max_num_seqs": 7, "dtype": "float16", "an_older_option": 1})
    page = browser.get(url("deployment", "change", deployment.pk)).content.decode()
    assert 'value="7"' in re.search(r'<input[^>]*name="max_num_seqs"[^>]*>', page)[0]
    assert re.search(r'<option value="float16"\s+selected', page)
    body = {"version": deployment.version_id, "max_num_seqs": "", "dtype": "float16"}
    assert browser.post(url("deployment", "change", deployment.pk), body).status_code == 302
    deployment.refresh_from_db()
    assert deployment.engine_options == {"dtype": "float16"}


def test_viewers_see_the_options(client, deployment):
    Deployment.objects.update(engine_options={"max_num_seqs": 7})
    viewer = User.objects.create_user("viewer", password="secret-enough", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_deployment"))
    client.force_login(viewer)
    page = client.get(url("deployment", "change", deployment.pk)).content.decode()
    assert re.search(r'"max_num_seqs":\s*7\b', unescape(re.sub(r"<[^>]+>", "", page)))


def test_a_reserved_name_is_refused_at_its_field(browser, deployment):
    body = {"name": "tgi", "version": deployment.version_id}
    assert "always means the default" in browser.post(url("deployment", "add"), body).content.decode()
    assert browser.post(url("deployment", "start", 999)).status_code == 404


def test_a_bad_adapter_is_refused_at_its_field(browser, deployment):
    body = {"name": "a", "model": deployment.version.model_id, "source": "/nowhere"}
    page = browser.post(url("adapter", "add"), body).content.decode()
    assert "must be a directory with an adapter that this server may read" in unescape(page)


def inline(count):
    """What the browser sends for the read-only list of versions."""
    rows = {f"versions-{i}-id": str(AdapterVersion.objects.order_by("-number")[i].pk) for i in range(count)}
    return {"versions-TOTAL_FORMS": count, "versions-INITIAL_FORMS": count, **rows}


def test_an_adapter_with_a_models_name_is_refused_at_its_field(browser, deployment):
    source = str(ROOT / "models" / "demo-adapters" / "json")
    body = {"name": deployment.name, "deployment": deployment.pk, "source": source, "workers": 0} | inline(0)
    assert "is the name of a model" in unescape(browser.post(url("adapter", "add"), body).content.decode())
    assert not Adapter.objects.exists()


def test_an_adapter_that_another_call_registers_meanwhile_is_not_replaced(browser, deployment, monkeypatch):
    folder = ROOT / "models" / "demo-adapters"
    register = adapters.register_adapter

    def overtaken(*arguments, **options):
        register("quick", deployment, str(folder / "json"), "other")
        return register(*arguments, **options)

    monkeypatch.setattr(adapters, "register_adapter", overtaken)
    body = {"name": "quick", "deployment": deployment.pk, "source": str(folder / "pirate"), "workers": 0} | inline(0)
    page = browser.post(url("adapter", "add"), body, follow=True)
    assert "quick is registered" in unescape(page.content.decode())


def test_an_adapter_is_registered_replaced_and_rolled_back(browser, deployment):
    folder = ROOT / "models" / "demo-adapters"
    body = {"name": "a", "deployment": deployment.pk, "source": str(folder / "pirate"), "workers": 0}
    body |= inline(0)
    assert browser.post(url("adapter", "add"), body).status_code == 302
    adapter = Adapter.objects.get()
    assert (adapter.current.number, adapter.preload) == (1, False)
    kept = {"source": "", "preload": "on", "workers": 2} | inline(1)
    assert browser.post(url("adapter", "change", adapter.pk), kept).status_code == 302
    adapter.refresh_from_db()
    assert (adapter.current.number, adapter.preload, adapter.workers) == (1, True, 2)
    changed = {"source": str(folder / "json"), "workers": 0} | inline(1)
    assert browser.post(url("adapter", "change", adapter.pk), changed).status_code == 302
    assert (Adapter.objects.get().current.number, Adapter.objects.get().preload) == (2, False)
    page = browser.get(url("adapter", "change", adapter.pk)).content.decode()
    assert str(folder / "pirate") in page
    browser.post(url("adapter", "roll_back", adapter.pk))
    assert Adapter.objects.get().current.number == 1
    listed = browser.get(url("adapter", "changelist")).content.decode()
    assert "1: " + str(folder / "pirate") in listed


def test_a_deleted_deployment_stays_as_a_record(browser, deployment):
    start_deployment(deployment, "tester")
    browser.post(url("deployment", "delete", deployment.pk), {"post": "yes"}, follow=True)
    deployment.refresh_from_db()
    assert (deployment.deleted, deployment.replicas) == (True, 0)
    assert Deployment.objects.exists()


KEY_FORM = {"name": "ci", "scopes": ["infer"], "expiry_date_0": "", "expiry_date_1": ""}


def test_a_key_is_shown_once_and_can_be_revoked(browser):
    answer = browser.post(url("apikey", "add"), KEY_FORM)
    key = ApiKey.objects.get()
    text = re.search(rf'value="({key.prefix}\.\w+)"', answer.content.decode())[1]
    assert ApiKey.objects.is_valid(text)
    assert "no-store" in answer["cache-control"]
    assert text not in str(browser.cookies)
    for page in (url("apikey"), url("apikey", "change", key.pk), url("apikey", "history", key.pk)):
        shown = browser.get(page).content.decode()
        assert text not in shown
        assert key.hashed_key not in shown
    assert url("apikey", "revoke", key.pk) in browser.get(url("apikey", "change", key.pk)).content.decode()
    assert browser.get(url("apikey", "revoke", key.pk)).status_code == 200
    key.refresh_from_db()
    assert not key.revoked
    browser.post(url("apikey", "revoke", key.pk), follow=True)
    key.refresh_from_db()
    assert key.revoked


def test_name_and_limits_of_a_key_can_be_changed(browser):
    key, _ = create_key("ci", ["infer"], "tester")
    changed = {"name": "robot", "expiry_date_0": "2099-01-01", "expiry_date_1": "00:00", "requests_per_minute": "9",
               "scopes": ["manage"], "tokens_per_minute": "", "revoked": "on"}  # fmt: skip
    assert browser.post(url("apikey", "change", key.pk), changed).status_code == 302
    found = ApiKey.objects.get()
    assert (found.name, found.requests_per_minute, found.tokens_per_minute) == ("robot", 9, 0)
    assert (found.expiry_date.year, found.scopes, found.revoked, found.prefix) == (2099, ["infer"], False, key.prefix)
    event = AuditEvent.objects.get(action="key.change")
    assert event.details["requests_per_minute"] == {"from": 0, "to": 9}
    assert "tokens_per_minute" not in event.details
    refused = browser.post(url("apikey", "change", key.pk), {**changed, "requests_per_minute": "-1"})
    assert "greater than or equal to 0" in refused.content.decode()


def test_a_revoked_key_stays_as_it_is(browser):
    key, _ = create_key("ci", ["infer"], "tester")
    revoke_key(key, "tester")
    assert browser.post(url("apikey", "change", key.pk), KEY_FORM).status_code == 403
    with pytest.raises(RegistryError, match="ci is revoked"):
        change_key(key, "tester", "robot", None, KeyLimits())


def test_the_form_says_whether_keys_are_required(browser, settings):
    settings.API_KEY_REQUIRED = False
    assert "This server asks for no keys" in browser.get(url("apikey", "add")).content.decode()
    settings.API_KEY_REQUIRED = True
    assert "This server asks for no keys" not in browser.get(url("apikey", "add")).content.decode()


def test_a_key_is_revoked_from_the_command_line_by_its_prefix_or_its_only_name(db, capsys):
    keys = [create_key(name, ["infer"], "tester")[0] for name in ("ci", "ci", "robot")]
    with pytest.raises(CommandError, match=f"2 keys have the name ci; give a prefix: .*{keys[0].prefix}"):
        call_command("revokekey", "ci")
    with pytest.raises(CommandError, match="no API key has the name or the prefix nobody"):
        call_command("revokekey", "nobody")
    assert not ApiKey.objects.filter(revoked=True).exists()
    call_command("revokekey", keys[0].prefix)
    call_command("revokekey", "ci")  # the other one is not revoked
    call_command("revokekey", "robot")
    call_command("revokekey", keys[2].prefix)
    assert capsys.readouterr().out.count("was revoked before") == 1
    assert ApiKey.objects.filter(revoked=True).count() == 3


def test_a_key_of_one_deployment_has_no_other_scope(browser, deployment):
    body = {"name": "ci", "deployment": deployment.pk, "expiry_date_0": "", "expiry_date_1": ""}
    refused = browser.post(url("apikey", "add"), {**body, "scopes": ["infer", "manage"]})
    assert "has the scope infer alone" in refused.content.decode()
    assert not ApiKey.objects.exists()
    browser.post(url("apikey", "add"), {**body, "scopes": ["infer"]})
    assert ApiKey.objects.get().deployment == deployment
    assert AuditEvent.objects.first().details["deployment"] == deployment.name


def test_a_key_has_a_weight_and_limits(browser):
    body = {"name": "ci", "scopes": ["infer"], "expiry_date_0": "", "expiry_date_1": ""}
    for field, value in (("weight", "0"), ("requests_per_minute", "-1"), ("tokens_per_minute", "3000000000")):
        browser.post(url("apikey", "add"), {**body, field: value})
        assert not ApiKey.objects.exists(), field
    browser.post(url("apikey", "add"), {**body, "weight": "2.5", "requests_per_minute": "9", "tokens_per_day": ""})
    key = ApiKey.objects.get()
    assert (key.weight, key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day) == (2.5, 9, 0, 0)


def test_limits_of_a_key_from_the_command_line(db):
    call_command("createkey", "ci", "--weight", "0.5", "--tokens-per-minute", "100")
    key = ApiKey.objects.get()
    assert (key.weight, key.requests_per_minute, key.tokens_per_minute) == (0.5, 0, 100)
    with pytest.raises(CommandError, match=r"weight: must be between 0\.01 and 1000"):
        call_command("createkey", "ci", "--weight", "0")


def test_a_key_of_one_deployment_from_the_command_line(deployment):
    call_command("createkey", "ci", deployment=deployment.name)
    assert ApiKey.objects.get().deployment == deployment
    for options, text in (({"deployment": "nothing"}, "no deployment nothing"),
                          ({"deployment": deployment.name, "scope": ["manage"]}, "infer alone")):  # fmt: skip
        with pytest.raises(CommandError, match=text):
            call_command("createkey", "ci", **options)


def test_audit_events_cannot_be_touched(browser, deployment):
    event = AuditEvent.objects.first()
    assert browser.post(url("auditevent", "delete", event.pk), {"post": "yes"}).status_code == 403
    assert browser.get(reverse("admin:management_auditevent_add")).status_code == 403


BUTTONS = [("deployment", "start"), ("deployment", "stop"), ("deployment", "make_default"), ("apikey", "revoke")]


@pytest.mark.parametrize(("page", "action"), BUTTONS)
def test_buttons_change_nothing_without_the_forms_token(admin_user, deployment, page, action):
    key, _ = create_key("ci", ["infer"], "tester")
    if action == "stop":
        start_deployment(deployment, "tester")
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin_user)
    address = url(page, action, deployment.pk if page == "deployment" else key.pk)
    events = AuditEvent.objects.count()
    assert strict.head(address).status_code == 200
    form = strict.get(address)
    assert strict.post(address).status_code == 403
    assert AuditEvent.objects.count() == events
    token = re.search(r'csrfmiddlewaretoken" value="(\w+)"', form.content.decode())[1]
    assert strict.post(address, {"csrfmiddlewaretoken": token}).status_code == 302
    assert AuditEvent.objects.count() > events


@pytest.mark.parametrize("number", ["abc", "\0", "0", "9" * 30])
@pytest.mark.parametrize(("page", "action"), [*BUTTONS, ("adapter", "roll_back")])
def test_a_button_of_no_row_is_not_found(browser, db, page, action, number):
    assert browser.get(url(page, action, number)).status_code == 404


def test_a_name_that_another_change_takes_after_the_check_is_a_message(browser, deployment, monkeypatch):
    def taken(*args, **fields):
        raise IntegrityError("duplicate key value violates unique constraint")

    monkeypatch.setattr(keys, "create_key", taken)
    body = {
        "name": "one",
        "scopes": ["infer"],
        "weight": 1,
        "requests_per_minute": 0,
        "tokens_per_minute": 0,
        "tokens_per_day": 0,
    }
    answer = browser.post(url("apikey", "add"), body, follow=True)
    assert "Another change came first" in answer.content.decode()
