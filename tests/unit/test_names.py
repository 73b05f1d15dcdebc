"""Which deployment and adapter a client's name means, and the names that lists show."""

from __future__ import annotations

import msgspec
import pytest

from management.snapshot import AdapterEntry, DeploymentEntry, Snapshot, WorkerEntry

READY = (WorkerEntry("w", 1, "unix:/w"),)


def adapter(name, digest=""):
    return AdapterEntry(name, digest or f"digest of {name}", "/a", 1)


def entry(name, *adapters, model="m", workers=READY, **fields):
    return DeploymentEntry(name, model, 1, 1, False, workers, tuple(map(adapter, adapters)), **fields)


def found(snapshot, name):
    resolved = snapshot.resolve(name)
    return resolved and (resolved.deployment.name, resolved.adapter.name if resolved.adapter else "")


@pytest.mark.parametrize(("name", "means"), [
    ("first", ("first", "")), ("m", ("first", "")), ("pirate", ("first", "pirate")), ("json", ("second", "json")),
    ("second:pirate", ("second", "pirate")), ("my first", ("first", "")), ("n", ("third", "")), ("first:json", None),
    ("third:pirate", None), ("none", None), (":pirate", None), ("", ("first", "")), ("tgi", ("first", "")),
    (None, ("first", "")),
])  # fmt: skip
def test_names_in_their_order(name, means):
    snapshot = Snapshot((
        entry("first", "pirate", title="my first"), entry("second", "pirate", "json", "n"), entry("third", model="n"),
    ))  # fmt: skip
    assert found(snapshot, name) == means


def test_the_default_deployment_goes_first_then_the_ready_ones_then_the_oldest():
    first, second = entry("first", "a", workers=(), title="t"), entry("second", "a", workers=(), title="t")
    for deployments, owner in (
        ((first, second), "first"),
        ((first, msgspec.structs.replace(second, workers=READY)), "second"),
        ((msgspec.structs.replace(first, is_default=True), msgspec.structs.replace(second, workers=READY)), "first"),
        ((msgspec.structs.replace(first, workers=READY), msgspec.structs.replace(second, is_default=True)), "second"),
    ):
        snapshot = Snapshot(deployments)
        assert [found(snapshot, name)[0] for name in ("a", "m", "t", None)] == [owner] * 4


def test_a_later_deployment_takes_no_name_away():
    first = entry("first", "pirate", title="t")
    later = entry("later", "pirate", title="t")
    for name in ("pirate", "m", "t", "first:pirate", None):
        assert found(Snapshot((first,)), name) == found(Snapshot((first, later)), name)


def test_an_adapter_of_several_versions_is_the_default_ones():
    old = entry("served", "a", served_name="served", label="1", is_default_version=False)
    new = entry("served/2", "a", served_name="served", label="2")
    snapshot = Snapshot((old, new))
    assert found(snapshot, "a") == ("served/2", "a")
    assert found(snapshot, "served:a") == ("served/2", "a")
    assert found(snapshot, "served/1:a") == ("served", "a")


def test_lists_show_the_shortest_name_that_means_an_adapter():
    first, second = entry("first", "a", "b"), entry("second", "a", "c", "first")
    snapshot = Snapshot((first, second))
    shown = {d.name: [snapshot.listed_adapter(d, a) for a in d.adapters] for d in snapshot.deployments}
    assert shown == {"first": ["a", "b"], "second": ["second:a", "c", "second:first"]}
    for name, owner in (("second:a", "second"), ("second:first", "second"), ("a", "first")):
        assert found(snapshot, name)[0] == owner
