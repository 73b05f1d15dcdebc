"""The registry and the store of adapters: versions, what is refused and leaves nothing, what is kept."""

from __future__ import annotations

import io
import os
import shutil
import struct
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import CONFIG, WEIGHTS, content_digest, parts
from management import adapter_store
from management.adapter_source import NotAllowed, open_source
from management.adapter_store import ABANDONED_S, GRACE_S, store_adapter, sweep_store
from management.models import Adapter, AuditEvent
from management.services.adapters import change_adapter, register_adapter, remove_adapter, roll_back
from management.services.deployments import change_deployment, create_deployment, delete_deployment, start_deployment
from management.services.discovery import register_beside
from management.services.errors import RegistryConflict, RegistryError
from management.services.models import register_model
from management.services.snapshots import build_snapshot, read_registries
from tests.unit.management.stored import ADAPTERS, JSON, PIRATE, left

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("store")]


@pytest.fixture
def copied(tmp_path):
    """An adapter's directory that a test may change, two folders below an allowed one."""
    return shutil.copytree(PIRATE, tmp_path / "roots" / "some" / "pirate")


def kept(adapter):
    return [(v.number, v.digest, v.is_current) for v in adapter.versions.order_by("number")]


def test_content_is_copied_once(deployment, copied, store):
    adapter = register_adapter("pirate", deployment, str(copied), "tester")
    version = adapter.current
    assert (version.rank, version.digest, version.source) == (8, content_digest(copied), str(copied))
    assert content_digest(store / version.digest) == version.digest
    shutil.rmtree(copied)
    assert content_digest(store / version.digest) == version.digest
    assert register_adapter("again", deployment, PIRATE, "tester").current.directory == version.directory
    assert left(store) == [version.digest]


def test_the_same_registration_twice_changes_nothing(deployment):
    first = register_adapter("pirate", deployment, PIRATE, "tester")
    events = AuditEvent.objects.count()
    assert register_adapter("pirate", deployment, PIRATE, "tester") == first
    assert AuditEvent.objects.count() == events
    with pytest.raises(RegistryConflict):
        register_adapter("pirate", deployment, PIRATE, "tester", replace=False)


def test_other_content_is_the_next_version_and_can_be_rolled_back(deployment):
    adapter = register_adapter("a", deployment, PIRATE, "tester")
    first = adapter.current.digest
    register_adapter("a", deployment, JSON, "tester")
    second = Adapter.objects.get().current.digest
    assert kept(adapter) == [(1, first, False), (2, second, True)]
    assert roll_back(adapter, "tester").number == 1
    assert kept(adapter) == [(1, first, True), (2, second, False)]
    with pytest.raises(RegistryError, match="no such earlier version"):
        roll_back(adapter, "tester")
    with pytest.raises(RegistryError, match="there are: 2"):
        roll_back(adapter, "tester", 7)
    roll_back(adapter, "tester", 2)
    register_adapter("a", deployment, PIRATE, "tester")
    assert kept(adapter) == [(1, first, True), (2, second, False)]
    assert [event.action for event in AuditEvent.objects.all()[:2]] == ["adapter.register", "adapter.roll_back"]


def test_the_command_rolls_back(deployment):
    adapter = register_adapter("a", deployment, PIRATE, "tester")
    register_adapter("a", deployment, JSON, "tester")
    out = io.StringIO()
    call_command("rollback", "a", stdout=out)
    assert out.getvalue() == f"a serves version 1, from {PIRATE}\n"
    assert [number for number, _, current in kept(adapter) if current] == [1]
    register_adapter("a", create_deployment("other", deployment.version, "tester"), JSON, "tester")
    for arguments, text in ((["a"], "--deployment: demo, other"), (["b"], "no adapter is named b"),
                            (["a", "--deployment", "demo", "--to", "9"], "no such earlier version")):  # fmt: skip
        with pytest.raises(CommandError, match=text):
            call_command("rollback", *arguments)


def test_names_are_each_deployments_own(deployment):
    other = create_deployment("other", deployment.version, "tester")
    register_adapter("pirate", deployment, PIRATE, "tester")
    register_adapter("pirate", other, JSON, "tester")
    assert [adapter.current.source for adapter in Adapter.objects.order_by("pk")] == [PIRATE, JSON]


def test_how_it_is_kept_stays_until_it_changes(deployment):
    register_adapter("pirate", deployment, PIRATE, "tester", preload=True, options={"a": "1"})
    adapter = register_adapter("pirate", deployment, PIRATE, "tester")
    assert (adapter.preload, adapter.pinned, adapter.options) == (True, False, {"a": "1"})
    change_adapter(adapter, "tester", preload=False, pinned=True, workers=2, options={"b": "2"})
    adapter.refresh_from_db()
    assert (adapter.preload, adapter.pinned, adapter.workers, adapter.options) == (False, True, 2, {"a": "1", "b": "2"})
    with pytest.raises(RegistryError, match="options: must be at most"):
        change_adapter(adapter, "tester", options={"x": "y" * 5000})
    remove_adapter(adapter, "tester")
    with pytest.raises(RegistryConflict):
        change_adapter(adapter, "tester", preload=True)


def test_a_deployment_serves_its_own_adapters_alone(deployment):
    register_adapter("first", deployment, PIRATE, "tester")
    start_deployment(deployment, "tester")
    other = create_deployment("other", deployment.version, "tester", replicas=1)
    register_adapter("second", other, JSON, "tester")
    served = {entry.name: [a.name for a in entry.adapters] for entry in build_snapshot(read_registries()).deployments}
    assert served == {"demo": ["first"], "other": ["second"]}


def test_a_deployment_takes_its_adapters_with_it(deployment, store):
    digest = register_adapter("pirate", deployment, PIRATE, "tester").current.digest
    again = register_adapter("pirate", create_deployment("other", deployment.version, "tester"), PIRATE, "tester")
    delete_deployment(deployment, "tester")
    assert list(Adapter.objects.all()) == [again]
    with pytest.raises(RegistryConflict, match="demo is deleted"):
        register_adapter("late", deployment, PIRATE, "tester")
    assert left(store) == [digest]


def test_adapters_stay_with_another_version_and_not_with_another_model(deployment):
    register_adapter("pirate", deployment, PIRATE, "tester")
    other = register_model("other", "/models/other", "tester")
    with pytest.raises(
        RegistryError, match="version: is another model's; remove the adapters first: pirate"
    ) as refused:
        change_deployment(deployment, "tester", version=other)
    assert set(refused.value.fields) == {"version"}
    change_deployment(deployment, "tester", version=register_model("demo", "/models/newer", "tester"))
    remove_adapter(deployment.adapters.get(), "tester")
    change_deployment(deployment, "tester", version=other)


def test_no_deployment_takes_the_name_of_an_adapter(deployment):
    register_adapter("pirate", deployment, PIRATE, "tester")
    for names in ({"name": "pirate"}, {"name": "new", "served_name": "pirate"}):
        with pytest.raises(RegistryError, match="name: pirate is the name of an adapter of demo"):
            create_deployment(version=deployment.version, actor="tester", **names)


def test_the_snapshot_has_the_current_content(deployment):
    start_deployment(deployment, "tester")
    register_adapter("z", deployment, PIRATE, "tester", pinned=True, options={"k": "v"})
    register_adapter("a", deployment, JSON, "tester")
    (entry,) = build_snapshot(read_registries()).deployments
    assert (entry.served_name, entry.label, entry.is_default_version) == ("demo", "1.0", True)
    assert [adapter.name for adapter in entry.adapters] == ["z", "a"]  # as they were registered
    found = entry.adapters[0]
    assert (found.source, found.pinned, found.rank, found.options) == (PIRATE, True, 8, (("k", "v"),))
    assert found.directory.endswith(found.digest)


def test_adapters_beside_a_model_are_registered(tmp_path):
    folder = tmp_path / "model"
    (folder / "adapters" / "broken").mkdir(parents=True)
    shutil.copytree(PIRATE, folder / "adapters" / "pirate")
    (folder / "adapters" / "link").symlink_to(JSON)
    own = create_deployment("own", register_model("own", str(folder), "tester"), "tester")
    register_beside(own, "tester")
    assert [adapter.name for adapter in Adapter.objects.all()] == ["pirate"]
    refused = AuditEvent.objects.filter(action="adapter.not_registered")
    assert sorted(event.target for event in refused) == ["broken", "link"]
    register_beside(own, "tester")
    assert Adapter.objects.count() == 1


def header(size, content=b"{}"):
    return struct.pack("<Q", size) + content


HOSTILE = {
    "no config": (lambda d: (d / CONFIG).unlink(), AdapterCode.MISSING),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), AdapterCode.MISSING),
    "a pickle": (lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), AdapterCode.PICKLED),
    "code": (lambda d: (d / "model.py").write_text("import os"), AdapterCode.CODE),
    "requirements": (lambda d: (d / "requirements.txt").write_text("evil"), AdapterCode.CODE),
    "a linked file": (lambda d: relink(d / WEIGHTS, JSON + "/" + WEIGHTS), AdapterCode.LINK),
    "a linked config": (lambda d: relink(d / CONFIG, "/etc/hostname"), AdapterCode.LINK),
    "a link that looks like the hub's": (lambda d: relink(d / WEIGHTS, "../../blobs/" + "0" * 40), AdapterCode.LINK),
    "a pipe": (lambda d: repipe(d / WEIGHTS), AdapterCode.NOT_A_FILE),
    "a folder": (lambda d: ((d / CONFIG).unlink(), (d / CONFIG).mkdir()), AdapterCode.NOT_A_FILE),
    "an empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), AdapterCode.SIZE),
    "no json": (lambda d: (d / CONFIG).write_text("{"), AdapterCode.BAD_CONFIG),
    "no adapter": (lambda d: (d / CONFIG).write_text("{}"), AdapterCode.NO_PEFT),
    "a rank": (lambda d: (d / CONFIG).write_text('{"peft_type": "LORA", "r": 9999}'), AdapterCode.RANK),
    "a header of 2 GiB": (lambda d: sparse(d / WEIGHTS, header(2 << 30), 3 << 30), AdapterCode.HEADER_SIZE),
    "a header of many tensors": (lambda d: sparse(d / WEIGHTS, header(3 << 20), 4 << 20), AdapterCode.HEADER_SIZE),
    "a header beyond the end": (lambda d: (d / WEIGHTS).write_bytes(header(1 << 40)), AdapterCode.HEADER_CUT),
    "half written": (lambda d: cut(d / WEIGHTS), AdapterCode.WEIGHTS_LENGTH),
    "no header": (lambda d: (d / WEIGHTS).write_bytes(header(2, b"[]")), AdapterCode.HEADER_INVALID),
}


def relink(file, target):
    file.unlink()
    file.symlink_to(target)


def repipe(file):
    file.unlink()
    os.mkfifo(file)


def sparse(file, begin, size):
    with file.open("wb") as out:
        out.write(begin)
        out.truncate(size)


def cut(file):
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size // 2)


@pytest.mark.parametrize("how", HOSTILE)
def test_what_is_refused_leaves_nothing(how, deployment, copied, store):
    spoil, code = HOSTILE[how]
    spoil(copied)
    with pytest.raises(RegistryError) as refused:
        register_adapter("x", deployment, str(copied), "tester")
    assert refused.value.failure.code is code
    assert left(store) == []
    assert not Adapter.objects.exists()


def test_a_file_that_changes_while_it_is_copied(deployment, copied, store, monkeypatch):
    def vanishing(*arguments):
        read = parts(*arguments)
        yield next(read)
        if arguments[1] == WEIGHTS:
            cut(copied / WEIGHTS)
        yield from read

    monkeypatch.setattr(adapter_store, "parts", vanishing)
    monkeypatch.setattr("engine.adapters.files.PART_BYTES", 1000)
    with pytest.raises(RegistryError) as refused:
        register_adapter("x", deployment, str(copied), "tester")
    assert refused.value.failure.code is AdapterCode.CHANGED_WHILE_READ
    assert left(store) == []


def test_weights_over_the_limit_are_refused_unread(deployment, copied, settings, monkeypatch):
    settings.MAX_ADAPTER_BYTES = (copied / WEIGHTS).stat().st_size - 1
    read = []
    monkeypatch.setattr(adapter_store, "parts", lambda f, name, size: read.append(name) or parts(f, name, size))
    with pytest.raises(RegistryError, match="must have between 1 and"):
        register_adapter("x", deployment, str(copied), "tester")
    assert WEIGHTS not in read


def test_damaged_content_is_replaced(deployment, copied, store):
    digest = register_adapter("a", deployment, str(copied), "tester").current.digest
    cut(store / digest / WEIGHTS)
    register_adapter("b", deployment, str(copied), "tester")
    assert content_digest(store / digest) == digest


def test_an_adapter_is_read_outside_of_the_transaction(deployment, monkeypatch):
    outside, depths = len(connection.savepoint_ids), []

    def watched(*arguments):
        depths.append(len(connection.savepoint_ids))
        return parts(*arguments)

    monkeypatch.setattr(adapter_store, "parts", watched)
    register_adapter("x", deployment, PIRATE, "tester")
    assert set(depths) == {outside}


def test_unused_content_leaves_after_a_while(deployment, store):
    used = register_adapter("used", deployment, PIRATE, "tester").current.digest
    with open_source(JSON, None) as source:
        unused = store_adapter(source).digest
    sweep_store({used})
    assert left(store) == sorted([used, unused])
    for folder in store.iterdir():
        os.utime(folder, (0, time.time() - GRACE_S - 60))
    sweep_store({used})
    assert left(store) == [used]


def test_what_a_killed_registration_left_is_removed(store):
    with adapter_store._incoming() as running:
        killed = store / ".incoming-killed"
        killed.mkdir()
        for folder in (running, killed):
            os.utime(folder, (0, time.time() - ABANDONED_S - 1))
        sweep_store(set())
        assert left(store) == [running.name]
    assert left(store) == []


def test_only_allowed_folders_are_read(tmp_path, copied):
    inside = tmp_path / "roots"
    outside = shutil.copytree(PIRATE, tmp_path / "outside")
    (inside / "link").symlink_to(outside)
    (inside / "deep").symlink_to(tmp_path)
    (inside / "round").symlink_to(inside / "round")
    for name in (outside, inside / "link", inside / "deep" / "outside", inside / ".." / "outside", inside / "round",
                 inside / "none", "", "~nobody-here/x", "x" * 5000, "\0", "/proc/self/cwd"):  # fmt: skip
        with pytest.raises(NotAllowed), open_source(str(name), [inside]):
            pass
    with open_source(str(copied), [inside]) as source:
        assert source.depth == 2
    alias = tmp_path / "alias"
    alias.symlink_to(inside)
    for root, name in ((alias, copied), (inside, copied), (alias, alias / "some" / "pirate")):
        with open_source(str(name), [root]):
            pass


def test_the_hubs_cache_may_link_to_its_own_blobs(tmp_path):
    repository = tmp_path / "hub" / "models--org--pirate"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate((CONFIG, WEIGHTS)):
        shutil.copy(ADAPTERS / "pirate" / name, repository / "blobs" / (str(number) * 40))
        (snapshot / name).symlink_to(f"../../blobs/{str(number) * 40}")
    with open_source(str(snapshot), [tmp_path / "hub"]) as source:
        assert store_adapter(source).digest == content_digest(ADAPTERS / "pirate")
    with open_source(str(snapshot), [snapshot.parent]) as source, pytest.raises(AdapterError):
        store_adapter(source)


@given(st.lists(st.sampled_from(["a", "..", ".", "", "/", "some", "pirate", "link", "\0", "é"]), max_size=6))
def test_no_path_leads_out(tmp_path_factory, parts):
    base = tmp_path_factory.getbasetemp() / "walk"
    if not base.exists():
        (base / "inside" / "a" / "some").mkdir(parents=True)
        (base / "inside" / "a" / "link").symlink_to(base)
    name = str(base / "inside") + "/" + "/".join(parts)
    try:
        with open_source(name, [base / "inside"]) as source:
            real = os.readlink(f"/proc/self/fd/{source.descriptor}")
    except NotAllowed:
        return
    assert real == str(base / "inside") or real.startswith(str(base / "inside") + "/")
