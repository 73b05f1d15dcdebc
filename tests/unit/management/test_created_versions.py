"""Deployments that are versions of a served name, created from whatever a client names as their model."""

from __future__ import annotations

import pytest
from django.db import IntegrityError

from management.models import Deployment
from management.services import served_models
from management.services.deployments import delete_deployment
from management.services.errors import RegistryError, SourceNotFound, VersionExists
from management.services.models import register_model
from management.services.served_models import ATTEMPTS, NewVersion, create_version

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folders(tmp_path):
    """Two models in a folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return (tmp_path,)


def test_the_first_version_is_the_default_and_its_heir_follows(folders):
    first = create_version(NewVersion(["one"], "chat", folders=folders), "tester")
    second = create_version(NewVersion(["two"], "chat", folders=folders), "tester")
    assert [(row.name, row.label, row.is_default_version) for row in (first, second)] == [
        ("chat", "1.0", True),
        ("chat/2.0", "2.0", False),
    ]
    assert (first.version.model, second.version.number) == (second.version.model, 2)
    delete_deployment(first, "tester")
    assert Deployment.objects.get(pk=second.pk).is_default_version


def test_versions_that_cannot_be(folders):
    create_version(NewVersion(["one"], "chat", folders=folders), "tester")
    for wanted in (NewVersion(["one"], "chat", folders=folders), NewVersion(["two"], "chat", "1.0", folders=folders)):
        with pytest.raises(VersionExists) as caught:
            create_version(wanted, "tester")
        assert (caught.value.name, caught.value.label) == ("chat", "1.0")
    with pytest.raises(SourceNotFound):
        create_version(NewVersion(["three"], "chat", folders=folders), "tester")
    with pytest.raises(RegistryError, match="always means the default"):
        create_version(NewVersion(["one"], "tgi", folders=folders), "tester")
    assert Deployment.objects.count() == 1


def test_a_registered_model_keeps_its_number(folders):
    register_model("known", str(folders[0] / "one"), "tester")
    register_model("known", str(folders[0] / "two"), "tester")
    assert create_version(NewVersion(["nothing", "known:1"], ""), "tester").label == "1.0"
    assert create_version(NewVersion(["known:2"], "known"), "tester").label == "2.0"


@pytest.mark.parametrize("failures", [1, ATTEMPTS])
def test_a_name_that_another_call_takes(folders, monkeypatch, failures):
    write, calls = served_models._write, []

    def taken(*args):
        calls.append(args)
        if len(calls) <= failures:
            raise IntegrityError
        return write(*args)

    monkeypatch.setattr(served_models, "_write", taken)
    wanted = NewVersion(["one"], "chat", folders=folders)
    if failures < ATTEMPTS:
        assert create_version(wanted, "tester").name == "chat"
        return
    with pytest.raises(IntegrityError):
        create_version(wanted, "tester")
    assert len(calls) == ATTEMPTS
