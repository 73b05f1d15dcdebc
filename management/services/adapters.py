"""Writes the registry of adapters: register, replace, roll back, change, remove. Their files are in the adapter store."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q

from engine.adapters.failures import AdapterCode, AdapterError, AdapterFailure
from engine.adapters.files import CONFIG
from management import adapter_store
from management.adapter_source import NotAllowed, open_source
from management.adapter_store import StoredAdapter, store_adapter
from management.models import Adapter, AdapterVersion, Deployment
from management.models.model import valid_name
from management.services import audit
from management.services.deployments import RESERVED_NAMES
from management.services.errors import RegistryConflict, RegistryError, StoreFull, refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 4096
MAX_SOURCE_CHARACTERS = 512
MAX_VERSIONS = 100
"""Versions of one adapter that are kept; the oldest ones are forgotten."""


def read_adapter(source: str, roots: Sequence[Path] | None) -> StoredAdapter:
    """Check the files of a PEFT directory below one of the folders `roots` (None: anywhere), and copy them into the store.
    Nothing is registered. Raises RegistryError.
    """
    try:
        with open_source(source, roots) as directory:
            if len(source) > MAX_SOURCE_CHARACTERS:
                text = f"must have at most {MAX_SOURCE_CHARACTERS} characters"
                raise RegistryError(f"source: {text}", fields={"source": [text]})
            return store_adapter(directory)
    except NotAllowed as error:
        failure = AdapterFailure(AdapterCode.MISSING, {"file": CONFIG})
        raise RegistryError(
            "source: must be a directory with an adapter that this server may read",
            failure,
            fields={"source": ["must be a directory with an adapter that this server may read"]},
        ) from error
    except AdapterError as error:
        raise RegistryError(f"source: {error}", error.failure, fields={"source": [str(error)]}) from error
    except OSError as error:  # the disk is full, or a folder may not be searched
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull("source: there is no room on the disk for the adapter") from error
        text = f"cannot be copied into the store: {error.strerror}"
        raise RegistryError(f"source: {text}", fields={"source": [text]}) from error


def register_adapter(
    name: str,
    deployment: Deployment,
    source: str,
    actor: str,
    stored: StoredAdapter | None = None,
    *,
    replace: bool = True,
    preload: bool | None = None,
    pinned: bool | None = None,
    workers: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Adapter:
    """Register what `read_adapter` has read (None: it is read now, from any folder) under a name; other content under a known
    name becomes its next version. None keeps the present values.

    Raises RegistryConflict if the deployment is deleted, or the name is known and `replace` is false; RegistryError.
    """
    refuse_invalid(name)
    if stored is None:
        stored = read_adapter(source, None)  # before the transaction, so that no lock is held meanwhile
    try:
        with transaction.atomic():
            # Before any of its adapters, as who deletes it does.
            owner = Deployment.objects.select_for_update(no_key=True).filter(pk=deployment.pk, deleted=False).first()
            if owner is None:
                raise RegistryConflict(f"{deployment.name} is deleted")
            known = Adapter.objects.select_for_update().filter(deployment=owner, name=name).first()
            if known is not None and not replace:
                raise RegistryConflict(f"name: {name} is registered", fields={"name": ["is registered"]})
            if known is None:
                refuse_taken(name)
            adapter = known or Adapter(name=name, deployment=owner)
            changed = _changes(adapter, preload=preload, pinned=pinned, workers=workers, options=options)
            if known is None or changed:
                _save(adapter)
            replaced = _serve(adapter, source, stored)
            if known is None or changed or replaced:
                audit.record(actor, "adapter.register", name, deployment=owner.name, source=source,
                             digest=stored.digest, preload=adapter.preload, pinned=adapter.pinned)  # fmt: skip
            return adapter
    except IntegrityError as error:
        raise RegistryConflict(f"name: {name} is being registered", fields={"name": ["is registered"]}) from error


@transaction.atomic
def change_adapter(
    adapter: Adapter,
    actor: str,
    *,
    preload: bool | None = None,
    pinned: bool | None = None,
    workers: int | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Change how an adapter is kept, and merge `options` over its own. Raises RegistryError."""
    current = _locked(adapter)
    merged = None if options is None else {**current.options, **options}
    changed = _changes(current, preload=preload, pinned=pinned, workers=workers, options=merged)
    if changed:
        _save(current)
        audit.record(actor, "adapter.change", current.name, deployment=current.deployment.name, **changed)


@transaction.atomic
def roll_back(adapter: Adapter, actor: str, number: int | None = None) -> AdapterVersion:
    """Serve an earlier version again; None means the one before the current. Requests that run finish with what they began
    with. Raises RegistryError.
    """
    current = _locked(adapter)
    versions = {version.number: version for version in current.versions.all()}
    now = current.current
    if number is None:
        number = max((each for each in versions if each < now.number), default=None)
    if number not in versions:
        choices = ", ".join(str(each) for each in sorted(versions) if each != now.number) or "none"
        raise RegistryError(f"version: {current.name} has no such earlier version; there are: {choices}",
                            fields={"version": [f"must be one of {choices}"]})  # fmt: skip
    _make_current(current, versions[number])
    audit.record(actor, "adapter.roll_back", current.name, deployment=current.deployment.name, version=number,
                 digest=versions[number].digest)  # fmt: skip
    return versions[number]


@transaction.atomic
def remove_adapter(adapter: Adapter, actor: str) -> None:
    """Remove an adapter and its versions from the registry, unless that has been done. Its files leave the store later."""
    current = Adapter.objects.select_for_update().filter(pk=adapter.pk).first()
    if current is None:
        return
    audit.record(actor, "adapter.remove", current.name, deployment=current.deployment.name)
    adapter_store.release(version.directory for version in current.versions.all())
    current.delete()


def refuse_invalid(name: str) -> None:
    """Refuse a name that no adapter can have, before the database is asked, which may not even compare with it. Raises
    RegistryError.
    """
    try:
        valid_name(name)
    except ValidationError as error:
        raise RegistryError(f"name: {error.message}", fields={"name": [str(error.message)]}) from error


def check_new(name: str, options: Mapping[str, str] | None) -> None:
    """Refuse what no adapter can have, before its files are read. Raises RegistryError."""
    refuse_invalid(name)
    if name in RESERVED_NAMES:
        raise RegistryError(f"name: {name} is the name of a model", fields={"name": ["is the name of a model"]})
    _check_options(options or {})


def refuse_taken(name: str) -> None:
    """Clients name models and adapters alike, and a model's name comes first: nobody could reach this adapter. Raises
    RegistryError.
    """
    models = Q(name=name) | Q(served_name=name) | Q(version__model__name=name)
    if name in RESERVED_NAMES or Deployment.objects.filter(models, deleted=False).exists():
        raise RegistryError(f"name: {name} is the name of a model", fields={"name": ["is the name of a model"]})


def _locked(adapter: Adapter) -> Adapter:
    current = Adapter.objects.select_for_update().filter(pk=adapter.pk).first()
    if current is None:
        raise RegistryConflict(f"{adapter.name} is removed")
    return current


def _changes(
    adapter: Adapter,
    *,
    preload: bool | None,
    pinned: bool | None,
    workers: int | None,
    options: Mapping[str, str] | None,
) -> dict[str, object]:
    """Set the fields that are given; returns those that changed."""
    given = {
        "preload": preload,
        "pinned": pinned,
        "workers": workers,
        "options": None if options is None else dict(options),
    }
    changed: dict[str, object] = {
        name: value for name, value in given.items() if value is not None and value != getattr(adapter, name)
    }
    for name, value in changed.items():
        setattr(adapter, name, value)
    return changed


def _check_options(options: Mapping[str, str]) -> None:
    texts = [str(part) for pair in options.items() for part in pair]
    unfit = any(len(text) > MAX_OPTION_CHARACTERS or "\0" in text for text in texts)  # PostgreSQL stores no NUL
    if len(options) > MAX_OPTIONS or unfit:
        text = f"must be at most {MAX_OPTIONS}, each of at most {MAX_OPTION_CHARACTERS} characters without NUL"
        raise RegistryError(f"options: {text}", fields={"options": [text]})


def _save(adapter: Adapter) -> None:
    _check_options(adapter.options)
    try:
        adapter.full_clean()
    except ValidationError as error:
        raise refused(error) from error
    adapter.save()


def _serve(adapter: Adapter, source: str, stored: StoredAdapter) -> bool:
    """Make this content the current version, a new one unless it was there before. False if it is current already."""
    versions = list(adapter.versions.all())
    known = next((version for version in versions if version.digest == stored.digest), None)
    if known is not None and (known.is_current, known.source, known.directory) == (True, source, str(stored.directory)):
        return False
    if known is None:
        number = max((version.number for version in versions), default=0) + 1
        known = AdapterVersion(adapter=adapter, number=number, digest=stored.digest, rank=stored.rank, is_current=False)
    known.source, known.directory = source, str(stored.directory)
    known.save()
    _make_current(adapter, known)
    for old in sorted(versions, key=lambda version: -version.number)[MAX_VERSIONS - 1 :]:
        if old.pk != known.pk:
            adapter_store.release([old.directory])
            old.delete()
    return True


def _make_current(adapter: Adapter, version: AdapterVersion) -> None:
    adapter.versions.filter(is_current=True).exclude(pk=version.pk).update(is_current=False)
    version.is_current = True
    version.save(update_fields=["is_current"])
