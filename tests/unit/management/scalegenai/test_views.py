"""The other calls of `/sg_inf`: answers, refusals, keys, secrets."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import get_resolver
from django.utils import timezone

from config.asgi import ControlPlane
from management.api.scalegenai import openapi, urls, views
from management.models import ApiKey, AuditEvent, Deployment, Node, Worker
from management.services.deployments import create_deployment
from management.services.errors import RegistryError
from management.services.keys import create_key
from management.services.models import register_model
from tests.conftest import DEMO, ROOT
from tests.unit.management.scalegenai.answers import refusal

pytestmark = pytest.mark.django_db
ADAPTERS = ROOT / "models" / "demo-adapters"


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


def test_the_last_decision_is_that_of_this_deployment(call, create):
    row = create()
    AuditEvent.objects.create(
        actor="autoscaler", action="deployment.scaling.up", target=row.name, details={"wanted": 2}
    )
    AuditEvent.objects.create(actor="autoscaler", action="deployment.scaling.up", target="other", details={"wanted": 9})
    last = AuditEvent.objects.create(
        actor="autoscaler", action="deployment.scaling.down", target=row.name, details={"wanted": 1, "blocked": "price"}
    )
    (shown,) = call("GET", "/sg_inf/list").json()
    at = last.at.strftime("%Y-%m-%d %H:%M:%S.%f")
    assert shown["metadata"]["last_decision"] == {"at": at, "rule": "down", "wanted": 1, "blocked": "price"}
    Deployment.objects.filter(pk=row.pk).update(created_at=timezone.now())
    assert call("GET", f"/sg_inf/{row.public_id}").json()["metadata"]["last_decision"] is None


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


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/sg_inf/x/scale/down", "/sg_inf/a/b/c", "/secret/other", "/sg_inf"])
def test_unknown_calls_are_answered_without_a_session(method, path):
    response = Client(enforce_csrf_checks=True).generic(method, path, b"{}", "application/json")
    assert (response.status_code, response.json()["message"]) == (404, "there is no such call")


def test_deployments_of_other_interfaces_are_shown(call):
    version = register_model("demo", str(DEMO), "t")
    row = create_deployment("mine", version, "t")
    kind = {"inference_kind": "embedding", "strategy": "rps_per_worker"}
    embedding = create_deployment("e", register_model("e", "/e", "t"), "t", **kind)
    body = call("GET", f"/sg_inf/{row.public_id}").json()
    assert (body["name"], body["model"], body["status"], body["engine"]) == ("mine", "demo", "INACTIVE", "vllm")
    body = call("GET", f"/sg_inf/{embedding.public_id}").json()
    assert (body["engine"], body["link"][-1]) == ("tei", "/")
    assert call("GET", f"/secret/AUTH_ENDPOINT_KEY_{row.public_id}").status_code == 404
    assert call("PUT", f"/sg_inf/{row.public_id}", {"initial_worker_config": {"max_workers": 3}}).status_code == 200
    row.refresh_from_db()
    assert row.max_workers == 3


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
    with pytest.raises(RegistryError, match="infer alone"):
        create_key("bound", ["infer", "manage"], "t", deployment=row)
    key, bound = create_key("bound", ["infer"], "t", deployment=row)
    ApiKey.objects.filter(pk=key.pk).update(scopes=["infer", "manage"])  # as nobody should
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


def test_planes_that_share_a_port_leave_these_paths_to_the_control_plane():
    plane = ControlPlane()
    for path in ("/sg_inf/list", "/secret/AUTH_ENDPOINT_KEY_x", "/user/verify"):
        assert plane.rank("GET", path) > 0


def test_every_route_is_documented():
    page = (ROOT / "docs" / "scalegenai.md").read_text()
    for method, path, _, _ in openapi.PATHS:
        assert f"`{method.upper()} {path}`" in page
