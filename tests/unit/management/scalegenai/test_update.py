"""Updates of a deployment."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, given, settings

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.messages import Stats
from management.models import Deployment
from management.services.adapters import register_adapter
from management.services.deployments import create_deployment
from management.services.models import register_model
from management.services.secrets import HUB_TOKEN, read_secret
from tests.conftest import DEMO, ROOT
from tests.unit.management.scalegenai.answers import refusal
from tests.unit.management.scalegenai.bodies_of_any_kind import ANY_BODY

pytestmark = pytest.mark.django_db
ADAPTERS = ROOT / "models" / "demo-adapters"


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


def test_an_answer_with_any_adapters_can_be_sent_back(call, create, tmp_path, monkeypatch):
    """One is the client's own, which no worker can load; the other was registered from a folder that is gone."""
    row = create(llm_loras=[{"name": "pirate", "src": str(ADAPTERS / "pirate")}])
    folder = shutil.copytree(ADAPTERS / "json", tmp_path / "json")
    register_adapter("json", row, str(folder), "t")
    shutil.rmtree(folder)
    digest = row.adapters.get(name="pirate").current.digest
    broken = {"w": Stats(failed_adapters={digest: AdapterFailure(AdapterCode.NO_ADAPTERS)})}
    monkeypatch.setattr("management.live._source", lambda: broken)
    path = f"/sg_inf/{row.public_id}"
    before = call("GET", path).json()
    assert [(each["name"], "error" in each) for each in before["llm_loras"]] == [("pirate", True), ("json", False)]
    assert call("PUT", path, {**before, "max_price_per_hour": 4}).json()["success"]
    assert call("GET", path).json() == {**before, "max_price_per_hour": 4.0}
    row.refresh_from_db()
    assert [each["name"] for each in row.vendor_fields["llm_loras"]] == ["pirate"]


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


@given(patch=ANY_BODY)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_update_is_done_or_refused_by_field(call, patch):
    row = Deployment.objects.first() or create_deployment("mine", register_model("demo", str(DEMO), "t"), "t")
    response = call("PATCH", f"/sg_inf/{row.public_id}", patch)
    assert response.status_code in (200, 400) or refusal(response)  # 400: a number that JSON lacks
    assert call("GET", f"/sg_inf/{row.public_id}").json()["initial_worker_config"]


@given(body=ANY_BODY)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_create_is_done_or_refused_by_field(call, body):
    response = call("POST", "/sg_inf/create", body)
    assert response.status_code in (200, 400) or refusal(response)
