"""Creates, changes and revokes API keys."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from django.db import transaction
from django.db.models import Q

from management.models import ApiKey
from management.models.access import LEAST_WEIGHT, MOST_PER_DAY, MOST_PER_MINUTE, MOST_WEIGHT, SCOPES
from management.services import audit
from management.services.errors import RegistryError
from management.snapshot import KeyLimits

if TYPE_CHECKING:
    from management.models import Deployment


UNLIMITED = KeyLimits()


@transaction.atomic
def create_key(
    name: str,
    scopes: list[str],
    actor: str,
    expires: datetime | None = None,
    deployment: Deployment | None = None,
    limits: KeyLimits = UNLIMITED,
) -> tuple[ApiKey, str]:
    """Create a key. A key with a `deployment` opens the inference of that deployment and nothing else. Returns the row and the key's
    text, which is not stored. Raises RegistryError.
    """
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise RegistryError(f"scopes: must be some of {', '.join(SCOPES)}")
    if deployment is not None and set(scopes) != {"infer"}:
        raise RegistryError("scopes: a key of one deployment has the scope infer alone")
    _check(limits)
    chosen = msgspec.structs.asdict(limits)
    key, text = ApiKey.objects.create_key(
        name=name, scopes=sorted(set(scopes)), expiry_date=expires, deployment=deployment, **chosen
    )
    of = {} if deployment is None else {"deployment": deployment.name}
    changed = {field: value for field, value in chosen.items() if value != getattr(UNLIMITED, field)}
    audit.record(actor, "key.create", f"{name} ({key.prefix})", scopes=sorted(set(scopes)), **of, **changed)
    return key, text


@transaction.atomic
def change_key(key: ApiKey, actor: str, name: str, expires: datetime | None, limits: KeyLimits) -> None:
    """Give a key another name, expiry or limits, which act within a second; what it opens stays.

    Raises RegistryError.
    """
    _check(limits)
    key = ApiKey.objects.select_for_update().get(pk=key.pk)
    if key.revoked:
        raise RegistryError(f"{key.name} is revoked")
    wanted = {"name": name, "expiry_date": expires, **msgspec.structs.asdict(limits)}
    changed = {field: value for field, value in wanted.items() if value != getattr(key, field)}
    if not changed:
        return
    told = {field: {"from": _plain(getattr(key, field)), "to": _plain(value)} for field, value in changed.items()}
    target = f"{key.name} ({key.prefix})"
    for field, value in changed.items():
        setattr(key, field, value)
    key.save(update_fields=[*changed])
    audit.record(actor, "key.change", target, **told)


def find_key(words: str) -> ApiKey:
    """The key with this prefix, or with this name if only one that is not revoked has it. Raises RegistryError."""
    named = list(ApiKey.objects.filter(Q(prefix=words) | Q(name=words, revoked=False)))
    by_prefix = [key for key in named if key.prefix == words]
    if by_prefix:
        return by_prefix[0]
    if not named:
        raise RegistryError(f"no API key has the name or the prefix {words}")
    if len(named) > 1:
        raise RegistryError(f"{len(named)} keys have the name {words}; give a prefix: {_prefixes(named)}")
    return named[0]


@transaction.atomic
def revoke_key(key: ApiKey, actor: str) -> None:
    """Revoke a key; it stops working within a second."""
    if not key.revoked:
        key.revoked = True
        key.save(update_fields=["revoked"])
        audit.record(actor, "key.revoke", f"{key.name} ({key.prefix})")


def limits_of(key: ApiKey) -> KeyLimits:
    """The limits in a key's row."""
    return KeyLimits(key.weight, key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)


def _prefixes(found: list[ApiKey]) -> str:
    return ", ".join(sorted(key.prefix for key in found))


def _plain(value: object) -> object:
    """The value as JSON has it."""
    return value.isoformat() if isinstance(value, datetime) else value


def _check(limits: KeyLimits) -> None:
    if not LEAST_WEIGHT <= limits.weight <= MOST_WEIGHT:
        raise RegistryError(f"weight: must be between {LEAST_WEIGHT} and {MOST_WEIGHT}")
    for field, most in {
        "requests_per_minute": MOST_PER_MINUTE,
        "tokens_per_minute": MOST_PER_MINUTE,
        "tokens_per_day": MOST_PER_DAY,
    }.items():
        if not 0 <= getattr(limits, field) <= most:
            raise RegistryError(f"{field}: must be between 0 and {most}")
