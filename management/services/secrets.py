"""Stores secrets of deployments, encrypted with Fernet (AES-128-CBC and HMAC-SHA256).

The key is DRAGOMAN_SECRETS_KEY, or a file that is generated once and only the owner can read. The setting may hold
several keys, the newest first: all decrypt, the first encrypts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from management.generated import generated
from management.models import Secret
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from management.models import Deployment

HUB_TOKEN = "hf_token"
ENDPOINT_KEY = "endpoint_key"


def store_secret(deployment: Deployment, name: str, value: str) -> None:
    """Encrypt and store; replaces an earlier value. An empty value removes the secret."""
    if not value:
        Secret.objects.filter(deployment=deployment, name=name).delete()
        return
    ciphertext = _cipher().encrypt(value.encode())
    Secret.objects.update_or_create(deployment=deployment, name=name, defaults={"ciphertext": ciphertext})


def read_secret(deployment: Deployment, name: str) -> str | None:
    """The secret, or None. Raises RegistryError if the key has changed since it was stored."""
    row = Secret.objects.filter(deployment=deployment, name=name).first()
    return None if row is None else decrypt(name, bytes(row.ciphertext))


def decrypt(name: str, ciphertext: bytes) -> str:
    """A stored secret's text. Raises RegistryError if the key has changed since it was stored."""
    try:
        return _cipher().decrypt(ciphertext).decode()
    except InvalidToken as error:
        raise RegistryError(f"{name}: cannot be decrypted; DRAGOMAN_SECRETS_KEY has changed") from error


def count_unreadable() -> tuple[int, int]:
    """How many stored secrets this process cannot decrypt, and how many there are. It makes no key."""
    rows, unreadable = list(Secret.objects.values_list("name", "ciphertext")), 0
    if not settings.SECRETS_KEY and not settings.SECRETS_KEY_FILE.exists():
        return len(rows), len(rows)
    for name, ciphertext in rows:
        try:
            decrypt(name, bytes(ciphertext))
        except RegistryError:
            unreadable += 1
    return unreadable, len(rows)


def _cipher() -> MultiFernet:
    text = settings.SECRETS_KEY or generated(settings.SECRETS_KEY_FILE, lambda: Fernet.generate_key().decode())
    try:
        return MultiFernet([Fernet(key.strip()) for key in text.split(",")])
    except ValueError as error:
        raise RegistryError("DRAGOMAN_SECRETS_KEY: must be 32 bytes as url-safe base64") from error
