"""The registries' services: what they allow, what they refuse, and the audit event of each change."""

from __future__ import annotations

import datetime
import json

import pytest
from django.utils import timezone

from management.models import ApiKey, AuditEvent, Deployment, Model, Worker
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
from management.snapshot import KeyLimits

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


def test_a_source_is_as_long_as_its_column_at_most():
    """SQLite would store a longer one, PostgreSQL would not."""
    assert register_model("m", "/" + "a" * 511, "tester").number == 1
    with pytest.raises(RegistryError, match="source: must have at most 512 characters"):
        register_model("m", "/" + "a" * 512, "tester")


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
    for replicas in (0, 1001):
        with pytest.raises(RegistryError, match="between 1 and 1000"):
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


def test_roles_follow_from_the_place(deployment):
    change_deployment(deployment, "tester", min_workers=3, max_workers=3, prefill_workers=1)
    start_deployment(deployment, "tester", replicas=3)
    row = Deployment.objects.get(pk=deployment.pk)
    ready = [Worker(deployment=row, version=row.version, index=n, epoch=n) for n in (2, 0, 1)]
    (entry,) = build_snapshot(read_registries(), ready).deployments
    assert [worker.role for worker in entry.workers] == ["prefill", "decode", "decode"]
    change_deployment(row, "tester", prefill_workers=0)
    (entry,) = build_snapshot(read_registries(), ready).deployments
    assert {worker.role for worker in entry.workers} == {"both"}


def test_some_workers_must_decode(deployment):
    for count in (1, 2):
        with pytest.raises(RegistryError, match="must be below max_workers, which is 1"):
            change_deployment(deployment, "tester", prefill_workers=count)
    with pytest.raises(RegistryError, match="must be 0 for embedding"):
        create_deployment(
            "e", deployment.version, "tester", inference_kind="embedding", strategy="rps_per_worker", max_workers=2,
            prefill_workers=1,
        )  # fmt: skip


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


def test_keys_have_a_weight_and_limits():
    limits = KeyLimits(2.5, 10, 1000, 1 << 40)
    _, text = create_key("ci", ["infer"], "tester", limits=limits)
    assert build_snapshot(read_registries()).find_key(text).limits == limits
    assert last_event().details == {
        "scopes": ["infer"], "weight": 2.5, "requests_per_minute": 10, "tokens_per_minute": 1000, "tokens_per_day": 1 << 40
    }  # fmt: skip
    _, text = create_key("plain", ["infer"], "tester")
    assert build_snapshot(read_registries()).find_key(text).limits == KeyLimits()
    assert last_event().details == {"scopes": ["infer"]}


@pytest.mark.parametrize(("field", "value"), [
    ("weight", 0.0), ("weight", -1.0), ("weight", float("nan")), ("weight", 1e9), ("requests_per_minute", -1),
    ("tokens_per_minute", 1 << 31), ("tokens_per_day", -1), ("tokens_per_day", 1 << 63),
])  # fmt: skip
def test_limits_are_in_range(field, value):
    with pytest.raises(RegistryError, match=f"^{field}: must be between"):
        create_key("ci", ["infer"], "tester", limits=KeyLimits(**{field: value}))
    assert not ApiKey.objects.exists()


def test_expired_keys_do_not_open():
    _, text = create_key("old", ["infer"], "tester", timezone.now() - datetime.timedelta(seconds=1))
    assert build_snapshot(read_registries()).find_key(text) is None


def test_audit_events_are_for_ever(deployment):
    event = last_event()
    with pytest.raises(TypeError, match="never changed"):
        event.save()
    with pytest.raises(TypeError, match="never deleted"):
        event.delete()


def test_a_start_beyond_the_limits_keeps_to_what_they_must_fit(deployment):
    change_deployment(deployment, "tester", min_workers=3, max_workers=3, prefill_workers=1)
    with pytest.raises(RegistryError, match="prefill_workers: must be below max_workers"):
        start_deployment(deployment, "tester", 1)
    deployment.refresh_from_db()
    assert (deployment.min_workers, deployment.max_workers) == (3, 3)


def test_a_name_that_is_too_long_is_refused_before_it_is_written(db):
    with pytest.raises(RegistryError, match=r"name: .*at most 128 characters"):
        register_model("a" * 129, "/a", "tester")
    assert not Model.objects.exists()


def test_workers_of_a_name_that_comes_again_have_names_of_their_own(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    delete_deployment(deployment, "tester")
    reconciler.reconcile_once()
    start_deployment(create_deployment("demo", deployment.version, "tester"), "tester")
    reconciler.reconcile_once()
    names = [(worker.config.worker_id, worker.config.epoch) for worker in launcher.workers]
    assert names == [("demo/0", 1), ("demo/0", 2)]
