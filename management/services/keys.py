"""Creates and revokes API keys."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from django.db import transaction

from management.models import ApiKey
from management.models.access import SCOPES
from management.services import audit
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from management.models import Deployment


@transaction.atomic
def create_key(
    name: str, scopes: list[str], actor: str, expires: datetime | None = None, deployment: Deployment | None = None
) -> tuple[ApiKey, str]:
    """Create a key; with a `deployment` it opens nothing else. Returns its row and its text; the text is not stored here.
    Raises RegistryError.
    """
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise RegistryError(f"scopes: must be some of {', '.join(SCOPES)}")
    key, text = ApiKey.objects.create_key(
        name=name, scopes=sorted(set(scopes)), expiry_date=expires, deployment=deployment
    )
    audit.record(actor, "key.create", f"{name} ({key.prefix})", scopes=sorted(set(scopes)))
    return key, text


@transaction.atomic
def revoke_key(key: ApiKey, actor: str) -> None:
    """Revoke a key; it stops working within a second."""
    if not key.revoked:
        key.revoked = True
        key.save(update_fields=["revoked"])
        audit.record(actor, "key.revoke", f"{key.name} ({key.prefix})")
