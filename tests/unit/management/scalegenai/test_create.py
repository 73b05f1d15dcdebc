"""`POST /sg_inf/create`: models, adapters, secrets, refusals."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from management import adapter_store
from management.models import Adapter, ApiKey, AuditEvent, Deployment, Model
from management.services.adapters import register_adapter
from management.services.deployments import create_deployment
from management.services.models import register_model
from management.services.secrets import HUB_TOKEN, read_secret
from tests.conftest import DEMO, ROOT
from tests.unit.management.scalegenai.answers import refusal

pytestmark = pytest.mark.django_db
BODIES = Path(__file__).parent / "bodies"
ADAPTERS = ROOT / "models" / "demo-adapters"


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
    assert [adapter.name for adapter in row.adapters.all()] == ["talk"]
    body = call("GET", f"/sg_inf/{row.public_id}").json()
    assert body["llm_loras"] == [{"name": "talk", "hf_repo": str(ADAPTERS / "pirate"), "hf_token": None}]
    again = create(llm_loras=[{"name": "talk", "src": str(ADAPTERS / "json")}])  # which has adapters of its own
    assert again.adapters.get().current.digest != row.adapters.get().current.digest
    settings.ADAPTER_ROOTS = []
    other = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "talk", "src": str(ADAPTERS / "json")}]}
    assert list(refusal(call("POST", "/sg_inf/create", other))) == ["llm_loras[0].hf_repo"]


def test_an_adapter_that_is_removed_while_the_answer_is_made_is_left_out(call, create):
    """Rows and their versions are read one after the other."""
    row = create(llm_loras=[{"name": "talk", "hf_repo": str(ADAPTERS / "pirate")}])
    Adapter.objects.get().versions.all().delete()
    assert call("GET", f"/sg_inf/{row.public_id}").json()["llm_loras"] == []


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

    downloaded = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", from_cache)
    row = create(hf_token="hf_one", llm_loras=[{"name": "pirate", "hf_repo": "org/pirate"}])
    assert row.adapters.get().current.source == "org/pirate"
    assert set(tokens) == {"hf_one"}
    body = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "a", "hf_repo": "org/none", "hf_token": "hf_two"}]}
    found = refusal(call("POST", "/sg_inf/create", body))
    assert "cannot be fetched from the hub" in found["llm_loras[0].hf_repo"]
    assert "hf_" not in found["llm_loras[0].hf_repo"]


@pytest.mark.parametrize(("was_ready", "checked"), [(False, ["talk"]), (True, [])])
def test_the_first_worker_checks_the_adapters(create, reconciler, launcher, was_ready, checked):
    """One that comes later must not stop a deployment that serves."""
    row = create(llm_loras=[{"name": "talk", "src": str(ADAPTERS / "pirate")}])
    Deployment.objects.filter(pk=row.pk).update(model_info=b"{}" if was_ready else None)
    reconciler.reconcile_once()
    (worker,) = launcher.workers
    assert list(worker.config.required_adapters) == checked
    assert worker.config.task == "generate"


def test_a_disk_without_room_is_no_mistake_of_the_clients(call, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapter_store, "_placed", full)
    body = {"name": "n", "model": str(DEMO), "llm_loras": [{"name": "talk", "src": str(ADAPTERS / "pirate")}]}
    answer = call("POST", "/sg_inf/create", body)
    assert (answer.status_code, answer.json()["message"]) == (507, "there is no room on the disk for the adapter")
    assert not Deployment.objects.exists()


def test_a_deployment_takes_no_name_from_an_adapter(call, create):
    owner = create_deployment("first", register_model("other", "/other", "t"), "t")
    register_adapter("pirate", owner, str(ADAPTERS / "pirate"), "t")
    row = create(name="pirate")
    assert row.name.startswith("pirate-")
    assert call("GET", f"/sg_inf/{row.public_id}").json()["name"] == "pirate"


def test_a_deleted_deployment_is_shown_with_what_it_was_given(call, create):
    lora = {"name": "talk", "hf_repo": str(ADAPTERS / "pirate"), "hf_token": None}
    row = create(llm_loras=[lora])
    assert call("DELETE", f"/sg_inf/{row.public_id}").status_code == 200
    assert not Adapter.objects.exists()
    assert call("GET", f"/sg_inf/{row.public_id}").json()["llm_loras"] == [lora]


@pytest.mark.parametrize("template", [
    "{{ 'x'|center(10**12) }}",
    "{{ 10 ** (10 ** 8) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
])  # fmt: skip
def test_a_template_that_never_ends_is_refused(call, template):
    """Its trial costs no more than two seconds, in a process of its own."""
    body = {"name": "chat", "inf_type": "llm", "model": str(DEMO), "custom_chat_template": template}
    response = call("POST", "/sg_inf/create", body)
    assert response.status_code == 422
    assert "custom_chat_template" in response.content.decode()
    assert "it takes too long or too much memory" in response.content.decode()
    assert not Deployment.objects.exists()


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('only tools') }}"])
def test_templates_that_render_or_refuse_the_trial_are_taken(create, template):
    assert create(custom_chat_template=template).chat_template == template


def test_a_trial_that_cannot_be_made_blames_nobody(create, monkeypatch):
    monkeypatch.setattr("management.chat_template.RENDERER", ("false",))
    assert create(custom_chat_template="{{ messages[-1].content }}").chat_template


def test_updates_try_no_template(create, call, monkeypatch):
    """It cannot be changed, and the deployment's row is locked meanwhile."""
    row = create(custom_chat_template="{{ messages[0].role }}")
    monkeypatch.setattr("management.chat_template.subprocess.run", None)
    response = call("PUT", f"/sg_inf/{row.public_id}", {"autoscaling_config": {"scale_to_zero": True}})
    assert response.status_code == 200, response.content


def test_machines_that_nobody_looks_for_are_a_warning(create):
    workers = {"instance_types": ["g5.xlarge"], "on_prem_node_ids": ["rack1-07"], "use_on_prem": True}
    assert create(initial_worker_config=workers).vendor_fields["warnings"] == [
        "initial_worker_config.instance_types: has no effect: workers run on this server's machine",
        "initial_worker_config.on_prem_node_ids: has no effect: workers run on this server's machine",
    ]


def test_labels_that_no_machine_can_have_are_a_warning(create, settings):
    settings.LAUNCHER = "ray"
    assert create(initial_worker_config={"instance_types": ["g5.xlarge"]}).vendor_fields["warnings"] == []
    (warning,) = create(initial_worker_config={"instance_types": ["not a label"]}).vendor_fields["warnings"]
    assert warning == "initial_worker_config: no worker can be started: no machine can have such labels"
