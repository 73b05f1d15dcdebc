"""Creates the first user of the admin."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from django.contrib.auth import get_user_model

if TYPE_CHECKING:
    from pathlib import Path


def ensure_admin(password_file: Path) -> None:
    """Create the user `admin` on the first start, with a random password in a file that only the owner can read."""
    users = get_user_model()
    if users.objects.filter(is_superuser=True).exists():
        return
    password = secrets.token_urlsafe(12)
    password_file.touch(mode=0o600)
    password_file.write_text(password + "\n")
    users.objects.create_superuser("admin", password=password)
