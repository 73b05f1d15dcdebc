"""The registries' services: what they allow, what they refuse, and the audit event of each change."""

from __future__ import annotations

import datetime
import json
import os
import shutil

import pytest
from django.db import connection
from django.utils import timezone

from engine.adapters.files import CONFIG, WEIGHTS, content_digest, parts
from management import adapter_identity
from management.models import Adapter, AuditEvent, Deployment
from management.services.adapters import register_adapter, remove_adapter
from management.services.deployments import (
    change_deployment,
    create_deployment,
    delete_deployment,
    make_default,
    start_deployment,
)
from management.services.errors import RegistryError
from management.services.keys import create_key, revoke_key
from management.services.models import register_model, remove_model
from management.services.snapshots import build_snapshot, read_registries
from tests.conftest import ROOT

pytestmark = pytest.mark.django_db


def last_event():
    return AuditEvent.objects.first()


def test_a_new_source_is_a_new_version():
    first = register_model("org/m", "/a", "tester")
    assert register_model("org/m", "/a", "tester") == first
    second = register_model("org/m", "/b", "tester")
    assert (second.number, second.is_default) == (2, True)
    first.refresh_from_db()
    assert not first.is_default
    assert (last_event().action, last_event().target) == ("model.register", "org/m:2")


@pytest.mark.parametrize("name", ["", " ", "-x", "a b", "x" * 129, "é"])
def test_bad_names(name):
    with pytest.raises(RegistryError, match="name"):
        register_model(name, "/a", "tester")


def test_a_used_model_stays(deployment):
    with pytest.raises(RegistryError, match="has deployments"):
        remove_model(deployment.version.model, "tester")
    delete_deployment(deployment, "tester")
    remove_model(deployment.version.model, "tester")
    assert last_event().action == "model.remove"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: must be between 1 and 4096"),
        ({"dtype": "int3"}, "Invalid enum value"),
        ({"nonsense": 1}, "nonsense"),
        ({"address": "unix:/tmp/x"}, "address: is set by the launcher"),
        ({"max_num_batched_tokens": 8}, "at least max_num_seqs"),
        (["x"], "must be an object"),
    ],
)
def test_engine_options_are_checked(options, text):
    version = register_model("m", "/a", "tester")
    with pytest.raises(RegistryError, match=text):
        create_deployment("d", version, "tester", options)
    assert not Deployment.objects.exists()


def test_deployment_refusals(deployment):
    with pytest.raises(RegistryError, match="with this name exists"):
        create_deployment("demo", deployment.version, "tester")
    with pytest.raises(RegistryError, match="always means the default"):
        create_deployment("tgi", deployment.version, "tester")
    for replicas in (0, 65):
        with pytest.raises(RegistryError, match="between 1 and 64"):
            start_deployment(deployment, "tester", replicas)
    with pytest.raises(RegistryError, match="dtype"):
        change_deployment(deployment, "tester", engine_options={"dtype": 5})


def test_names_resolve_as_documented(deployment):
    other = create_deployment("other", register_model("org/m", "/b", "tester"), "tester")
    for row in (deployment, other):
        start_deployment(row, "tester")
    snapshot = build_snapshot(read_registries())
    assert {n: snapshot.resolve(n).deployment.name for n in (None, "", "tgi", "dummy", "demo", "other", "org/m")} == {
        None: "demo", "": "demo", "tgi": "demo", "dummy": "demo", "demo": "demo", "other": "other", "org/m": "other",
    }  # fmt: skip
    assert snapshot.resolve("nobody") is None
    make_default(other, "tester")
    assert build_snapshot(read_registries()).resolve(None).deployment.name == "other"


def test_keys_are_hashed_scoped_and_revocable():
    key, text = create_key("ci", ["infer", "metrics"], "tester")
    assert text not in json.dumps(list(AuditEvent.objects.values("target", "details")))
    assert text not in key.hashed_key
    entry = build_snapshot(read_registries()).find_key(text)
    assert entry.scopes == {"infer", "metrics"}
    assert build_snapshot(read_registries()).find_key(text + "x") is None
    assert build_snapshot(read_registries()).find_key("") is None
    revoke_key(key, "tester")
    assert build_snapshot(read_registries()).find_key(text) is None
    assert last_event().action == "key.revoke"
    with pytest.raises(RegistryError, match="scopes"):
        create_key("x", ["root"], "tester")


def test_expired_keys_do_not_open():
    _, text = create_key("old", ["infer"], "tester", timezone.now() - datetime.timedelta(seconds=1))
    assert build_snapshot(read_registries()).find_key(text) is None


def test_audit_events_are_for_ever(deployment):
    event = last_event()
    with pytest.raises(TypeError, match="never changed"):
        event.save()
    with pytest.raises(TypeError, match="never deleted"):
        event.delete()


def test_adapters(deployment, tmp_path):
    model = deployment.version.model
    source = ROOT / "models" / "demo-adapters" / "pirate"
    adapter = register_adapter("pirate", model, str(source), "tester")
    assert adapter.rank == 8
    assert len(adapter.digest) == 64
    assert register_adapter("pirate", model, str(source), "tester") == adapter
    with pytest.raises(RegistryError, match=r"adapter_config\.json is missing"):
        register_adapter("none", model, str(tmp_path), "tester")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(RegistryError, match="not a PEFT configuration"):
        register_adapter("none", model, str(tmp_path), "tester")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 9999}')
    with pytest.raises(RegistryError, match="rank between"):
        register_adapter("none", model, str(tmp_path), "tester")
    other = register_model("other", "/b", "tester").model
    with pytest.raises(RegistryError, match="an adapter of demo"):
        register_adapter("pirate", other, str(source), "tester")
    remove_adapter(adapter, "tester")
    assert not Adapter.objects.exists()


def test_preload_and_pinned_are_kept_until_they_change(deployment):
    model = deployment.version.model
    source = str(ROOT / "models" / "demo-adapters" / "pirate")
    register_adapter("pirate", model, source, "tester", preload=True)
    again = register_adapter("pirate", model, source, "tester")
    assert (again.preload, again.pinned) == (True, False)
    changed = register_adapter("pirate", model, source, "tester", preload=False, pinned=True)
    assert (changed.preload, changed.pinned) == (False, True)


@pytest.fixture
def copied(tmp_path):
    """An adapter's directory whose files have been there for a while."""
    source = ROOT / "models" / "demo-adapters" / "pirate"
    for name in (CONFIG, WEIGHTS):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def test_an_adapter_is_read_outside_of_the_transaction(deployment, copied, monkeypatch):
    outside = len(connection.savepoint_ids)
    depths = []

    def watched(*arguments):
        depths.append(len(connection.savepoint_ids))
        return parts(*arguments)

    monkeypatch.setattr(adapter_identity, "parts", watched)
    register_adapter("copied", deployment.version.model, str(copied), "tester")
    assert set(depths) == {outside}


def test_an_adapter_that_did_not_change_is_not_read_again(copied, monkeypatch):
    monkeypatch.setattr(adapter_identity, "SETTLED_S", -60.0)  # as if it had been there for a minute
    read = []
    monkeypatch.setattr(adapter_identity, "parts", lambda f, name, size: read.append(name) or parts(f, name, size))
    first = adapter_identity.identify(copied)
    assert adapter_identity.identify(copied) == first
    assert read.count(WEIGHTS) == 1
    with (copied / WEIGHTS).open("r+b") as file:  # as long as before, at its old time
        status = os.fstat(file.fileno())
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
        file.flush()
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    assert adapter_identity.identify(copied).digest != first.digest
    assert read.count(WEIGHTS) == 2
    assert adapter_identity.identify(copied).digest == content_digest(copied)


def test_an_adapter_of_a_moment_ago_is_read_each_time(copied, monkeypatch):
    monkeypatch.setattr(adapter_identity, "SETTLED_S", 3600.0)
    read = []
    monkeypatch.setattr(adapter_identity, "parts", lambda f, name, size: read.append(name) or parts(f, name, size))
    os.utime(copied / WEIGHTS)
    for _ in range(2):
        adapter_identity.identify(copied)
    assert read.count(WEIGHTS) == 2


def test_weights_over_the_limit_are_refused_unread(copied, settings, monkeypatch):
    settings.MAX_ADAPTER_BYTES = (copied / WEIGHTS).stat().st_size - 1
    read = []
    monkeypatch.setattr(adapter_identity, "parts", lambda f, name, size: read.append(name) or parts(f, name, size))
    with pytest.raises(match="must have between 1 and"):
        adapter_identity.identify(copied)
    assert WEIGHTS not in read
