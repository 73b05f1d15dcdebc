"""Adapters of before deployments owned them: each deployment still serves what it served, and none serves another's."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from management.models import Adapter, AuditEvent

OLD, NEW = ("management", "0018_keys_in_one_table"), ("management", "0021_deployments_own_adapters")


def owned():
    rows = Adapter.objects.select_related("deployment").prefetch_related("versions")
    return sorted((row.deployment.name, row.name, row.current.digest, row.versions.count()) for row in rows)


@pytest.mark.django_db(transaction=True)
def test_each_deployment_keeps_the_adapters_that_it_serves():
    apps = MigrationExecutor(connection).migrate([OLD]).apps
    model = apps.get_model("management", "Model").objects.create(name="m")
    version = model.versions.create(number=1, source="/m")
    lonely = apps.get_model("management", "Model").objects.create(name="lonely")
    adapters = {}
    for name, owner in (("a", model), ("b", model), ("c", lonely)):
        adapters[name] = apps.get_model("management", "Adapter").objects.create(
            name=name, model=owner, pinned=name == "a"
        )
        for number in (1, 2):
            adapters[name].versions.create(
                number=number,
                digest=f"{name}{number}",
                rank=8,
                source=f"/{name}",
                directory="/s",
                is_current=number == 2,
            )
    Deployment = apps.get_model("management", "Deployment")
    for name, fields in (
        ("all", {}), ("one", {"chosen_adapters_only": True}), ("none", {"chosen_adapters_only": True}),
        ("gone", {"deleted": True}),
    ):  # fmt: skip
        row = Deployment.objects.create(name=name, version=version, public_id=name, **fields)
        if name == "one":
            row.adapters.add(adapters["a"])
    MigrationExecutor(connection).migrate([NEW])
    expected = [("all", "a", "a2", 2), ("all", "b", "b2", 2), ("one", "a", "a2", 2)]
    assert owned() == expected
    assert {row.pinned for row in Adapter.objects.filter(name="a")} == {True}
    lost = AuditEvent.objects.get(target="c")
    assert (lost.action, lost.details) == ("adapter.remove", {"model": "lonely", "source": "/c"})
    before = MigrationExecutor(connection).migrate([OLD]).apps
    chosen = before.get_model("management", "Deployment").objects.filter(chosen_adapters_only=True)
    assert {row.name: sorted(a.name for a in row.adapters.all()) for row in chosen} == {
        "all": ["a", "b"], "one": ["a"], "none": [],
    }  # fmt: skip
    newest = MigrationExecutor(connection)
    newest.migrate(newest.loader.graph.leaf_nodes("management"))
    assert owned() == expected
