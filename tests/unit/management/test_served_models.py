"""Versions of a served name, from models of several names."""

from __future__ import annotations

import json

import pytest

from management.models import Model
from management.services.served_models import NewVersion, create_version
from management.services.sources import registered_version

pytestmark = pytest.mark.django_db


@pytest.fixture
def folder(tmp_path):
    def make(name):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        return str(path)

    return make


def test_a_version_leaves_the_model_of_another_name_as_it_is(deployment, folder):
    source = registered_version("demo").source
    first = create_version(NewVersion(("demo",), "M"), "tester")
    second = create_version(NewVersion((folder("other"),), "M"), "tester")
    third = create_version(NewVersion((folder("third"),), "M"), "tester")
    assert [each.version_label for each in (first, second, third)] == ["1.0", "2.0", "3.0"]
    assert registered_version("demo").source == source
    assert Model.objects.get(name="demo").versions.count() == 1
    assert second.version.model != first.version.model


def test_a_new_source_is_the_next_version_of_the_names_own_model(folder):
    first = create_version(NewVersion((folder("one"),), "M"), "tester")
    second = create_version(NewVersion((folder("two"),), "M"), "tester")
    assert (first.version.number, second.version.number) == (1, 2)
    assert first.version.model == second.version.model
    assert [each.version_label for each in (first, second)] == ["1.0", "2.0"]
