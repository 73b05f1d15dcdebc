"""Creates and revokes API keys."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from django.db import transaction

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
def revoke_key(key: ApiKey, actor: str) -> None:
    """Revoke a key; it stops working within a second."""
    if not key.revoked:
        key.revoked = True
        key.save(update_fields=["revoked"])
        audit.record(actor, "key.revoke", f"{key.name} ({key.prefix})")


def limits_of(key: ApiKey) -> KeyLimits:
    """The limits in a key's row."""
    return KeyLimits(key.weight, key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)


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
