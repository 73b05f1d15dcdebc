"""The calls of `/sg_inf` over Django's client, without workers: answers, refusals, audit events, secrets."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import OperationalError
from django.urls import get_resolver
from django.utils import timezone

from management.api.scalegenai import openapi, sources, urls, views
from management.models import Adapter, ApiKey, AuditEvent, Deployment, Model, Node, Worker
from management.services.adapters import register_adapter
from management.services.deployments import create_deployment
from management.services.keys import create_key
from management.services.models import register_model
from management.services.secrets import HUB_TOKEN, read_secret
from tests.conftest import DEMO, ROOT

pytestmark = pytest.mark.django_db
BODIES = Path(__file__).parent / "bodies"
ADAPTERS = ROOT / "models" / "demo-adapters"


@pytest.fixture
def call(client):
    """Send a JSON body with a wrong Content-Type, which is ignored. Returns the response."""

    def send(method, path, body=None, **headers):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body)
        return client.generic(method, path, data, "text/plain", headers=headers)

    return send


@pytest.fixture
def create(call):
    """Create a deployment of the demo model and return its row."""

    def send(**fields):
        response = call("POST", "/sg_inf/create", {"name": "chat", "model": str(DEMO), **fields})
        assert response.status_code == 200, response.content
        assert response.json() == {"success": True, "message": {"inf_id": response.json()["message"]["inf_id"]}}
        return Deployment.objects.get(public_id=response.json()["message"]["inf_id"])

    return send


def refusal(response, status=422):
    """The refused fields by dotted name, with their texts."""
    assert response.status_code == status, response.content
    body = response.json()
    assert body["success"] is False
    assert all(message.endswith(each["msg"]) for message, each in zip(body["message"], body["detail"], strict=True))
    return {
        message.partition(": ")[0]: each["msg"] for message, each in zip(body["message"], body["detail"], strict=True)
    }


def observe(row, state, **fields):
    """What the reconciler would write."""
    current = Deployment.objects.get(pk=row.pk)
    Deployment.objects.filter(pk=row.pk).update(state=state, observed_generation=current.generation, **fields)


def test_list_is_a_bare_array_or_nothing(call, create):
    empty = call("GET", "/sg_inf/list")
    assert (empty.status_code, empty.content) == (204, b"")
    first, second = create(), create()
    assert [each["id"] for each in call("GET", "/sg_inf/list").json()] == [first.public_id, second.public_id]


def test_a_list_forgets_what_was_deleted_long_ago(call, create):
    row = create()
    observe(row, "deleted", deleted=True, ended_at=timezone.now())
    assert call("GET", "/sg_inf/list").json()[0]["status"] == "DELETED"
    observe(row, "deleted", ended_at=timezone.now() - timedelta(hours=25))
    assert call("GET", "/sg_inf/list").status_code == 204
    assert call("GET", f"/sg_inf/{row.public_id}").json()["status"] == "DELETED"


def test_create_starts_a_deployment_with_a_key_of_its_own(create):
    row = create(hf_token="hf_secret", initial_worker_config={"min_workers": 2})
    assert (row.name, row.title, row.owner, row.replicas) == ("chat", "chat", "scalegenai", 2)
    assert (row.version.source, row.version.model.name) == (str(DEMO), "demo")
    assert read_secret(row, HUB_TOKEN) == "hf_secret"
    key = ApiKey.objects.get()
    assert (key.deployment, key.scopes) == (row, ["infer"])
    actions = [event.action for event in AuditEvent.objects.order_by("id")]
    assert actions == ["model.register", "deployment.create", "deployment.start", "key.create"]


def test_names_need_not_be_unique(create):
    first, second, third = create(), create(), create(name="tgi")
    assert first.name == "chat"
    assert second.name == f"chat-{second.public_id[:8]}"
    assert third.name == f"tgi-{third.public_id[:8]}"
    assert (second.title, third.title) == ("chat", "tgi")
    assert create(name="Ünser Näme!").name == "nser-N-me-"


def test_get_is_the_object_within_the_documented_envelope(call, create):
    row = create(hf_token="hf_secret", max_model_len=64, later=1, throughput_optimized=True)
    observe(
        row, "active", reason="", price_per_hour=1.5, cost=2.5, scale_blocked="capacity", cost_updated_at=timezone.now()
    )
    body = call("GET", f"/sg_inf/{row.public_id}").json()
    assert (body["success"], body["message"], body["id"], body["status"]) == (True, "ok", row.public_id, "ACTIVE")
    assert (body["current_price_per_hour"], body["cost"], body["hf_token"]) == (1.5, 2.5, "***")
    assert body["link"] == f"http://127.0.0.1:8000/deployments/{row.public_id}"
    assert (body["metadata"]["scale_blocked"], body["metadata"]["extra"]) == ("capacity", {"later": 1})
    assert body["timestamp"] == row.created_at.strftime("%Y-%m-%d %H:%M:%S.%f")
    assert body["autoscaling_config"]["upper_allowed_latency_sec"] == 1.0
    assert row.engine_options["max_num_batched_tokens"] == 4096
    assert row.engine_options["max_model_len"] == body["max_model_len"] == 64


def test_an_unknown_id_is_no_content_to_get_and_not_found_to_changes(call):
    for path in ("nope", "a%00b", "%F0%9F%98%80", "x" * 300):
        assert call("GET", f"/sg_inf/{path}").status_code == 204
        assert call("DELETE", f"/sg_inf/{path}").status_code == 404
        assert call("POST", f"/sg_inf/{path}/scale/up").json()["success"] is False
        assert call("PUT", f"/sg_inf/{path}", {}).status_code == 404
        assert call("GET", f"/secret/AUTH_ENDPOINT_KEY_{path}").status_code == 404


def test_deployments_of_other_interfaces_are_shown(call):
    version = register_model("demo", str(DEMO), "t")
    row = create_deployment("mine", version, "t")
    embedding = create_deployment("e", register_model("e", "/e", "t", "embedding"), "t", strategy="rps_per_worker")
    body = call("GET", f"/sg_inf/{row.public_id}").json()
    assert (body["name"], body["model"], body["status"], body["engine"]) == ("mine", "demo", "INACTIVE", "vllm")
    body = call("GET", f"/sg_inf/{embedding.public_id}").json()
    assert (body["engine"], body["link"][-1]) == ("tei", "/")
    assert call("GET", f"/secret/AUTH_ENDPOINT_KEY_{row.public_id}").status_code == 404
    assert call("PUT", f"/sg_inf/{row.public_id}", {"initial_worker_config": {"max_workers": 3}}).status_code == 200
    row.refresh_from_db()
    assert row.max_workers == 3


def test_the_printed_curl_works_as_printed(call):
    response = call("POST", "/sg_inf/create", (BODIES / "printed_curl.txt").read_bytes())
    assert response.status_code == 200, response.content
    assert "superfluous" in response.headers["Warning"]
    row = Deployment.objects.get()
    assert (row.version.source, row.scale_to_zero, row.max_workers) == ("meta-llama/Llama-3.1-70B-Instruct", True, 4)
    for name in ("request_block.json", "parameter_list.json"):
        assert call("POST", "/sg_inf/create", (BODIES / name).read_bytes()).status_code == 200


def test_a_registered_model_is_used_as_it_is(create):
    version = register_model("mine", str(DEMO), "t")
    assert create(model="mine").version == version
    assert create(model=str(DEMO)).version == version
    assert Model.objects.count() == 1


def test_a_directory_never_replaces_a_model_of_its_name(create):
    version = register_model("demo", "/elsewhere", "t")
    row = create()
    assert row.version.model.name.startswith("demo-")
    version.refresh_from_db()
    assert version.is_default


@pytest.mark.parametrize(
    "model", ["/etc", "../x", "no such", "./models/../models/demo", "~nobody/x", "a/b/c", "x" * 512]
)
def test_models_that_cannot_be(call, model):
    found = refusal(call("POST", "/sg_inf/create", {"name": "n", "model": model}))
    assert list(found) == ["model"]
    assert not Model.objects.exists()


def test_models_outside_the_allowed_folders(call, settings, tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    shutil.copytree(DEMO, outside / "demo")
    inside.mkdir()
    (inside / "link").symlink_to(outside / "demo")
    shutil.copytree(DEMO, inside / "files")
    (inside / "files" / "config.json").unlink()
    (inside / "files" / "config.json").symlink_to(outside / "demo" / "config.json")
    settings.MODEL_ROOTS = [inside]
    texts = set()
    for path in (outside / "demo", inside / "link", inside / "files", inside / "none"):
        texts.add(refusal(call("POST", "/sg_inf/create", {"name": "n", "model": str(path)}))["model"])
    assert len(texts) == 1  # it does not tell what exists elsewhere
    assert str(tmp_path) not in texts.pop()
    shutil.copytree(DEMO, inside / "demo")
    assert call("POST", "/sg_inf/create", {"name": "n", "model": str(inside / "demo")}).status_code == 200
    settings.MODEL_ROOTS = []
    assert "model" in refusal(call("POST", "/sg_inf/create", {"name": "n", "model": str(DEMO)}))


def test_all_refusals_come_at_once_and_nothing_is_left(call):
    body = {"name": "n", "model": str(DEMO), "max_model_len": 10**7, "llm_loras": [{"name": "a", "src": "/none"}]}
    found = refusal(call("POST", "/sg_inf/create", body))
    assert set(found) == {"max_model_len", "llm_loras[0].hf_repo"}
    assert "model's own limit" in found["max_model_len"]
    assert not Model.objects.exists()
    assert not AuditEvent.objects.exists()
    assert list(refusal(call("POST", "/sg_inf/create", {**body, "llm_loras": [], "max_model_len": None,
                                                        "vllm_extra_args": "--max-model-len 9999999"}))) == [
        "vllm_extra_args"
    ]  # fmt: skip


def test_adapters_are_registered_and_attached(call, create, settings):
    row = create(llm_loras=[{"name": "talk", "hf_repo": str(ADAPTERS / "pirate"), "hf_token": "hf_lora"}])
    adapter = Adapter.objects.get()
    assert (adapter.name, adapter.model, list(row.adapters.all())) == ("talk", row.version.model, [adapter])
    body = call("GET", f"/sg_inf/{row.public_id}").json()
    assert body["llm_loras"] == [{"name": "talk", "hf_repo": str(ADAPTERS / "pirate"), "hf_token": None}]
    again = create(llm_loras=[{"name": "talk", "src": str(ADAPTERS / "pirate")}])
    assert list(again.adapters.all()) == [adapter]
    other = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "talk", "src": str(ADAPTERS / "json")}]}
    assert list(refusal(call("POST", "/sg_inf/create", other))) == ["llm_loras[0].name"]
    settings.ADAPTER_ROOTS = []
    other["llm_loras"][0]["name"] = "new"
    assert list(refusal(call("POST", "/sg_inf/create", other))) == ["llm_loras[0].hf_repo"]


def test_adapters_come_from_the_hub(call, create, monkeypatch, tmp_path):
    snapshot = tmp_path / "models--org--pirate" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(ADAPTERS / "pirate", snapshot)
    (tmp_path / "models--org--pirate" / "refs").mkdir()
    (tmp_path / "models--org--pirate" / "refs" / "main").write_text(snapshot.name)
    tokens = []

    def from_cache(repository, token=None, dry_run=False, **options):
        """The hub's own function on a cache of the test's own; offline, it cannot ask for sizes."""
        tokens.append(token)
        return [] if dry_run else downloaded(repository, token=token, cache_dir=tmp_path, **options)

    downloaded = sources.snapshot_download
    monkeypatch.setattr(sources, "snapshot_download", from_cache)
    row = create(hf_token="hf_one", llm_loras=[{"name": "pirate", "hf_repo": "org/pirate"}])
    assert row.adapters.get().source == str(snapshot)
    assert set(tokens) == {"hf_one"}
    body = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "a", "hf_repo": "org/none", "hf_token": "hf_two"}]}
    found = refusal(call("POST", "/sg_inf/create", body))
    assert "cannot be fetched from the hub" in found["llm_loras[0].hf_repo"]
    assert "hf_" not in found["llm_loras[0].hf_repo"]


def test_scale_up_wakes_and_adds(call, create):
    row = create(initial_worker_config={"max_workers": 3})
    path = f"/sg_inf/{row.public_id}/scale/up"
    observe(row, "active", target_workers=1)
    assert call("POST", f"{path}?vm_num=2").json() == {"success": True, "message": "scaling up"}
    row.refresh_from_db()
    assert row.replicas == 3
    observe(row, "active", target_workers=3)
    assert call("POST", path).status_code == 409
    observe(row, "provisioning")
    assert call("POST", path, {"vm_num": 1}).json()["message"] == "already scaling up"
    observe(row, "failed", replicas=0)
    assert call("POST", path).status_code == 200
    assert list(refusal(call("POST", path, {"vm_num": 0}))) == ["vm_num"]
    assert call("POST", path, b"{").status_code == 400


def test_scale_to_zero_is_idempotent(call, create):
    row = create()
    path = f"/sg_inf/{row.public_id}/scale/zero"
    observe(row, "active")
    assert call("POST", f"{path}?force=False").json()["message"] == "scaling to zero"
    assert call("POST", path).json()["message"] == "already scaled to zero"
    assert call("POST", f"{path}?force=yes").json()["message"] == "scaling to zero"
    row.refresh_from_db()
    assert (row.replicas, row.force, row.current_state) == (0, True, "inactive")
    assert list(refusal(call("POST", f"{path}?force=maybe"))) == ["force"]


def test_delete_leaves_a_record_and_is_idempotent(call, create):
    row = create()
    path = f"/sg_inf/{row.public_id}"
    assert call("DELETE", f"{path}?force=False").json() == {"success": True, "message": "deleting"}
    assert call("DELETE", f"{path}?force=False").json() == {"success": True, "message": "already deleted"}
    assert call("DELETE", f"{path}?force=True").json() == {"success": True, "message": "deleting"}
    assert call("GET", path).json()["status"] == "DELETING"
    assert [event.action for event in AuditEvent.objects.all()].count("deployment.delete") == 1
    assert call("POST", f"{path}/scale/up").status_code == 409
    assert call("POST", f"{path}/scale/zero").status_code == 409
    assert call("PUT", path, {}).status_code == 409
    assert call("GET", f"/secret/AUTH_ENDPOINT_KEY_{row.public_id}").status_code == 404
    assert create().name == "chat"  # the name is free again


@pytest.mark.parametrize(
    ("method", "suffix"), [("PUT", ""), ("PATCH", ""), ("POST", ""), ("POST", "/update"), ("PUT", "/update")]
)
def test_update_changes_what_it_names(call, create, method, suffix):
    row = create(autoscaling_config={"scale_up_time_window_sec": 50}, extra_one=1)
    body = {
        "initial_worker_config": {"max_workers": 7, "colour": "red"},
        "autoscaling_config": {"scale_to_zero": True, "upper_allowed_latency_sec": 9},
        "imidiate_scale_down": True,
        "max_price_per_hour": 4,
        "allow_spot_instances": None,
    }
    response = call(method, f"/sg_inf/{row.public_id}{suffix}", body)
    assert (response.status_code, response.json()) == (200, {"success": True, "message": "updated"})
    row.refresh_from_db()
    assert (row.max_workers, row.scale_to_zero, row.up_window_s, row.upper_threshold) == (7, True, 50, 9.0)
    assert (row.immediate_scale_down, row.max_price_per_hour, row.spot) == (True, 4.0, False)
    assert row.vendor_fields["extra"] == {"extra_one": 1, "initial_worker_config": {"colour": "red"}}
    assert call(method, f"/sg_inf/{row.public_id}{suffix}", {"max_price_per_hour": 0}).status_code == 200
    row.refresh_from_db()
    assert (row.max_price_per_hour, row.immediate_scale_down) == (None, False)


def test_an_answer_can_be_sent_back(call, create):
    row = create(
        hf_token="hf_one", vllm_extra_args="--api-key k --seed 1", gateway_config={"name": "AWS", "region": "x"}
    )
    path = f"/sg_inf/{row.public_id}"
    before = call("GET", path).json()
    assert call("PUT", path, before).status_code == 200
    assert call("GET", path).json() == before
    row.refresh_from_db()
    assert read_secret(row, HUB_TOKEN) == "hf_one"


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"initial_worker_config": {"min_workers": 200}}, ["initial_worker_config.min_workers"]),
        ({"initial_worker_config": {"max_workers": 0}, "model": "x", "name": "other"},
         ["model", "name", "initial_worker_config.max_workers"]),
        ({"autoscaling_config": {"lower_allowed_threshold": 7}}, ["autoscaling_config.lower_allowed_threshold"]),
        ({"autoscaling_config": 3}, ["autoscaling_config"]),
        ({"imidiate_scale_down": "yes"}, ["imidiate_scale_down"]),
        ({"hf_token": "hf_new"}, ["hf_token"]),
        ({"llm_loras": [{"name": ["x"]}]}, ["llm_loras[0].name", "llm_loras[0].hf_repo"]),
        ({"llm_loras": [{"name": "a", "src": "/none"}]}, ["llm_loras[0].hf_repo"]),
    ],
)  # fmt: skip
def test_updates_that_are_refused(call, create, body, fields):
    row = create()
    before = call("GET", f"/sg_inf/{row.public_id}").json()
    assert list(refusal(call("PUT", f"/sg_inf/{row.public_id}", body))) == fields
    assert call("GET", f"/sg_inf/{row.public_id}").json() == before


def test_updates_attach_adapters(call, create):
    row = create(llm_loras=[{"name": "pirate", "src": str(ADAPTERS / "pirate")}])
    path = f"/sg_inf/{row.public_id}"
    assert call("PUT", path, {"llm_loras": [{"name": "json", "hf_repo": str(ADAPTERS / "json")}]}).status_code == 200
    assert sorted(row.adapters.values_list("name", flat=True)) == ["json", "pirate"]
    assert [each["name"] for each in call("GET", path).json()["llm_loras"]] == ["pirate", "json"]
    other = {"llm_loras": [{"name": "pirate", "hf_repo": str(ADAPTERS / "json")}]}
    assert list(refusal(call("PUT", path, other))) == ["llm_loras"]


def test_nodes_models_and_caller(call, create):
    row = create()
    Node.objects.create(name="n1", address="10.0.0.7")
    Worker.objects.create(
        deployment=row, version=row.version, index=0, epoch=1, state="ready", address="unix:/x", node="n1"
    )
    nodes = call("GET", f"/sg_inf/{row.public_id}/gpu_nodes_ips").json()
    assert nodes == [{"id": "n1", "ip": "10.0.0.7", "tailscale_ip": None}]
    for path in ("/sg_inf/supported_models", "/sg_inf/supported-models"):
        assert call("GET", path).json() == [{"model": "demo", "type": "llm"}]
    assert call("POST", "/user/verify").json() == {"email": "scalegenai"}


def test_the_endpoint_key_is_shown_to_its_owner(call, create):
    row = create()
    name = f"AUTH_ENDPOINT_KEY_{row.public_id}"
    response = call("GET", f"/secret/{name}")
    assert ApiKey.objects.get().is_valid(response.json()["secret"][name])
    assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/sg_inf/list", "GET"),
        ("OPTIONS", "/sg_inf/create", "POST"),
        ("GET", "/sg_inf/create", "POST"),
        ("TRACE", "/sg_inf/x", "GET, POST, PUT, PATCH, DELETE"),
        ("SETUP", "/sg_inf/x", "GET, POST, PUT, PATCH, DELETE"),
        ("GET", "/user/verify", "POST"),
        ("DELETE", "/sg_inf/x/scale/up", "POST"),
    ],
)
def test_other_methods(call, method, path, allowed):
    response = call(method, path)
    assert (response.status_code, response.headers["Allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/sg_inf", "/sg_inf/", "/sg_inf/a/b", "/secret/OTHER", "/secret"])
def test_unknown_paths(call, path):
    assert (call("GET", path).status_code, call("GET", path).json()["success"]) == (404, False)


def test_keys_open_by_scope(call, create, settings):
    row = create()
    settings.API_KEY_REQUIRED = True
    _, manage = create_key("boss", ["manage"], "t")
    _, infer = create_key("user", ["infer"], "t")
    _, bound = create_key("bound", ["infer", "manage"], "t", deployment=row)
    _, old = create_key("old", ["manage"], "t", expires=timezone.now())
    paths = [("GET", "/sg_inf/list"), ("POST", "/sg_inf/create"), ("GET", f"/secret/AUTH_ENDPOINT_KEY_{row.public_id}"),
             ("PUT", "/sg_inf/none"), ("POST", "/user/verify")]  # fmt: skip
    for method, path in paths:
        for token, status in ((None, 401), ("x", 401), (old, 401), (manage + "x", 401), (infer, 403), (bound, 403)):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            assert call(method, path, **headers).status_code == status
    assert call("GET", "/sg_inf/list").headers["WWW-Authenticate"] == "Bearer"
    assert call("POST", "/user/verify", Authorization=f"bearer {manage}").json() == {"email": "boss"}
    body = {"name": "n", "model": str(DEMO)}
    assert call("POST", "/sg_inf/create", body, Authorization=f"Bearer {manage}").status_code == 200
    assert AuditEvent.objects.filter(action="deployment.create").first().actor == "boss"


def test_a_session_is_no_key(settings, admin_client):
    settings.API_KEY_REQUIRED = True
    assert admin_client.get("/sg_inf/list").status_code == 401


def test_a_large_body(call, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    response = call("POST", "/sg_inf/create", {"name": "x" * 1000})
    assert (response.status_code, response.json()["success"]) == (413, False)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": NaN}'])
def test_a_body_that_is_no_json(call, body):
    assert call("POST", "/sg_inf/create", body).status_code == 400


def test_a_database_that_is_away(call, monkeypatch):
    def away():
        raise OperationalError("the server closed the connection")

    monkeypatch.setattr(views, "listed_deployments", away)
    monkeypatch.setattr(views.connection, "close", lambda: None)  # the test's transaction lives in it
    response = call("GET", "/sg_inf/list")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert "closed" not in response.content.decode()


def test_no_secret_leaves(call, create, caplog, capfd):
    caplog.set_level("DEBUG")
    row = create(hf_token="hf_secret", api_key="hf_secret", vllm_extra_args="--hf-token hf_secret",
                 llm_loras=[{"name": "p", "src": str(ADAPTERS / "pirate"), "hf_token": "hf_secret"}])  # fmt: skip
    key = call("GET", f"/secret/AUTH_ENDPOINT_KEY_{row.public_id}").json()["secret"].popitem()[1]
    path = f"/sg_inf/{row.public_id}"
    answers = [
        call("GET", path),
        call("GET", "/sg_inf/list"),
        call("PUT", path, {"hf_token": "hf_secret", "max_price_per_hour": -1}),
        call("PUT", path, {"llm_loras": [{"name": "q", "hf_repo": "org/none", "hf_token": "hf_secret"}]}),
        call("POST", "/sg_inf/create", {"name": 1, "hf_token": ["hf_secret"]}),
        call("DELETE", path),
    ]
    audit = json.dumps([[event.target, event.details] for event in AuditEvent.objects.all()])
    stored = json.dumps(list(Deployment.objects.values()), default=str)
    texts = [answer.content.decode() for answer in answers] + [audit, stored, caplog.text, *capfd.readouterr()]
    for text in texts:
        assert "hf_secret" not in text
        assert key not in text


def test_every_route_is_in_the_document(call):
    document = call("GET", "/sg_inf/openapi.json").json()
    assert set(document["components"]["schemas"]) >= {"DeploymentIn", "UpdateIn", "AutoscalingConfig"}
    resolver = get_resolver()
    for path, operations in document["paths"].items():
        view = resolver.resolve(path.replace("{id}", "abc")).func.view_class
        offered = {name for name in view.http_method_names if hasattr(view, name)}
        assert set(operations) <= offered
    documented = {resolver.resolve(path.replace("{id}", "abc")).func.view_class for _, path, _, _ in openapi.PATHS}
    served = {pattern.callback.view_class for pattern in urls.urlpatterns}
    assert served - documented == {views.DocumentView, views.UnknownView}


def test_an_adapter_of_another_model(call, create):
    register_adapter("pirate", register_model("other", "/other", "t").model, str(ADAPTERS / "pirate"), "t")
    body = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "pirate", "src": str(ADAPTERS / "pirate")}]}
    assert list(refusal(call("POST", "/sg_inf/create", body))) == ["llm_loras[0].name"]
    assert not Deployment.objects.exists()
