"""What the registry of adapters refuses before anything of it is stored: names, sources, options, a store that is full."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil

import pytest

from config.registry import DjangoRegistry
from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import WEIGHTS, content_digest
from inference.errors import Unavailable
from management import adapter_store
from management.adapter_source import open_source
from management.adapter_store import store_adapter
from management.models import Adapter, AuditEvent
from management.services.adapters import register_adapter
from management.services.deployments import create_deployment
from management.services.discovery import register_beside
from management.services.errors import RegistryError, StoreFull
from management.services.models import register_model
from tests.unit.management.stored import ADAPTERS, JSON, PIRATE, left

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("store")]


@pytest.fixture
def copied(tmp_path):
    """An adapter's directory that a test may change."""
    return shutil.copytree(PIRATE, tmp_path / "roots" / "pirate")


def test_names_beside_a_model_that_no_adapter_can_have(tmp_path, store):
    """A file's name may be no text, or longer than the audit log's column."""
    folder = tmp_path / "model" / "adapters"
    shutil.copytree(PIRATE, folder / "pirate")
    for name in ("n" * 250, "a b", "tgi", "own", "x\n", os.fsdecode(b"bad\xff")):
        shutil.copytree(JSON, folder / name)
    own = create_deployment("own", register_model("own", str(folder.parent), "tester"), "tester", {})
    register_beside(own, "tester")
    assert [adapter.name for adapter in Adapter.objects.all()] == ["pirate"]
    refused = AuditEvent.objects.filter(action="adapter.not_registered")
    assert {event.target for event in refused} == {"n" * 200, "a b", "tgi", "own", "x\n", "bad\\udcff"}
    assert set(left(store)) <= {content_digest(ADAPTERS / "pirate"), content_digest(ADAPTERS / "json")}


def test_the_database_is_not_asked_for_a_name_that_it_cannot_compare(deployment, django_assert_num_queries):
    with django_assert_num_queries(0), pytest.raises(RegistryError) as refused:
        register_adapter("a\0b", deployment, PIRATE, "tester")
    assert "name" in refused.value.fields


@pytest.mark.parametrize("name", ["own", "served", "dummy", "x\n", "a b", ""])
def test_names_that_an_adapter_cannot_have(name, deployment):
    create_deployment("own", register_model("base", "/models/base", "tester"), "tester", {}, served_name="served")
    with pytest.raises(RegistryError) as refused:
        register_adapter(name, deployment, PIRATE, "tester")
    assert "name" in refused.value.fields
    assert not Adapter.objects.exists()


def test_what_postgresql_cannot_store_is_refused(deployment, copied):
    with pytest.raises(RegistryError) as refused:
        register_adapter("x", deployment, PIRATE, "tester", options={"note": "a\0b"})
    assert "options" in refused.value.fields
    deep = copied.parent
    while len(str(deep)) < 512:
        deep = deep / ("d" * 100)
    shutil.copytree(copied, deep)
    with pytest.raises(RegistryError) as refused:
        register_adapter("x", deployment, str(deep), "tester")
    assert "source" in refused.value.fields
    assert not Adapter.objects.exists()


def test_a_store_that_cannot_be_written_is_a_refusal(deployment, store, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapter_store, "_placed", full)
    with pytest.raises(StoreFull, match="no room on the disk"):
        register_adapter("x", deployment, PIRATE, "tester")
    with pytest.raises(Unavailable, match="no room on the disk"):  # what dialects answer with 503
        asyncio.run(DjangoRegistry(None, None).read_adapter("x", PIRATE, None))
    assert left(store) == []
    assert not Adapter.objects.exists()


def test_a_link_that_is_replaced_while_it_is_read(copied, monkeypatch):
    (copied / WEIGHTS).unlink()
    (copied / WEIGHTS).symlink_to(JSON + "/" + WEIGHTS)
    read = os.readlink

    def replaced(name, **options):
        (copied / WEIGHTS).unlink()
        return read(name, **options)

    monkeypatch.setattr(os, "readlink", replaced)
    with open_source(str(copied), None) as source, pytest.raises(AdapterError) as refused:
        store_adapter(source)
    assert refused.value.failure.code is AdapterCode.CHANGED_WHILE_READ
