"""What an operator reads if a command cannot begin: one line for each mistake, which names the setting or the file.

It shows no value of a setting, which may be a secret.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from pydantic import ValidationError

from config.installation import DATABASE
from config.options import get_options

if TYPE_CHECKING:
    from pathlib import Path

    from django.db import Error

PREFIX = "DRAGOMAN_"
VALIDATORS = "Value error, "
"""What pydantic puts before the text of a validator of ours."""
NO_TABLE = ("no such table", "no such column", "does not exist")
"""How SQLite and PostgreSQL say that `migrate` has not run."""


class UnusableSettings(Exception):
    """Settings that are refused, or a data folder that cannot be used."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def read_settings() -> None:
    """Read Django's settings, which make the data folder and a key in it. Raises UnusableSettings."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    try:
        folder = get_options().data_dir
        import_module(os.environ["DJANGO_SETTINGS_MODULE"])
    except ValidationError as error:
        raise UnusableSettings(settings_refused(error)) from error
    except OSError as error:
        raise UnusableSettings([folder_refused(folder, error)]) from error


def settings_refused(error: ValidationError) -> list[str]:
    """A line for each refused setting."""
    lines = []
    for each in error.errors(include_input=False, include_url=False):
        text = each["msg"].removeprefix(VALIDATORS)
        lines.append(f"{PREFIX}{str(each['loc'][0]).upper()}: {text}" if each["loc"] else text)
    return lines


def folder_refused(folder: Path, error: OSError) -> str:
    """Why the data folder cannot be used."""
    return f"{PREFIX}DATA_DIR: {folder} cannot be used: {error.strerror or error}{of_another_user(folder)}"


def registry_refused(error: Error, data_dir: Path, database_url: str) -> str:
    """Why the database cannot be used, in one line. No text of a database's driver has a password."""
    text = one_line(error)
    file = data_dir / DATABASE
    if not database_url:
        text = f"{file}: {text}{of_another_user(file)}"
    missing = any(words in text for words in NO_TABLE)
    return f"the registry cannot be used: {text}" + ("; run `migrate` first" if missing else "")


def one_line(error: Error) -> str:
    """What the database's driver says, which may be several lines."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def of_another_user(path: Path) -> str:
    """Whose a file or folder is, in brackets, if it is not this user's."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return ""
    return "" if owner == os.geteuid() else f" (it is of user {owner}, and this process runs as {os.geteuid()})"
