"""What an operator reads if a command cannot begin: one line for each mistake, which names the setting or the file.

It shows no value of a setting, which may be a secret.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from config.installation import DATABASE
from config.options import get_options
from management.database_errors import with_advice

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from django.db import Error

PREFIX = "DRAGOMAN_"
VALIDATORS = "Value error, "
"""What pydantic puts before the text of a validator of ours."""
EXPECTED = {
    "list_type": 'a JSON list is expected, such as ["a", "b"]',
    "dict_type": 'a JSON object is expected, such as {"a": 1}',
}
"""What a setting expects, by the kind of pydantic's error; other kinds say it themselves."""


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


def settings_refused(error: ValidationError, flags: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """A line for each refused setting, by the name of its variable, or of the flag that gave it."""
    lines = []
    for each in error.errors(include_input=False, include_url=False):
        text = EXPECTED.get(each["type"], each["msg"].removeprefix(VALIDATORS))
        name = variable(str(each["loc"][0])) if each["loc"] else ""
        lines.append(f"{flags.get(name, name)}: {text}" if name else text)
    return lines


def variable(name: str) -> str:
    """The variable of a setting. Those that other servers know too have their names as aliases."""
    return name if name.isupper() else PREFIX + name.upper()


def start_refused(error: Exception) -> str:
    """Why a command cannot begin: a line for each refused setting, else the error's own text."""
    return "\n".join(settings_refused(error)) if isinstance(error, ValidationError) else str(error)


def folder_refused(folder: Path, error: OSError) -> str:
    """Why the data folder cannot be used."""
    return f"{PREFIX}DATA_DIR: {folder} cannot be used: {error.strerror or error}{of_another_user(folder)}"


def registry_refused(error: Error, data_dir: Path, database_url: str) -> str:
    """Why the database cannot be used, in one line."""
    text, file = with_advice(error), data_dir / DATABASE
    if not database_url:
        text = f"{file}: {text}{of_another_user(file)}"
    return f"the registry cannot be used: {text}"


def of_another_user(path: Path) -> str:
    """Whose a file or folder is, in brackets, if it is not this user's."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return ""
    return "" if owner == os.geteuid() else f" (it is of user {owner}, and this process runs as {os.geteuid()})"
