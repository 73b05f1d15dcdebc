"""Django's command line with this server's settings and version; `manage.py` and the installed `dragoman` share it."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

from config.help import help_text
from config.installation import version

WITHOUT_DJANGO = {
    "cluster-certificates": "config.cluster_certificates",
    "conformance": "config.conformance.run",
    "doctor": "config.doctor.run",
    "health": "config.health",
    "makesecret": "config.make_secret",
}
"""Commands that need no Django, or must run before it reads settings that may be what is wrong: `main(program, arguments)`
returns the exit status.
"""
INVALID_SETTINGS = 2
"""The exit status if the settings cannot be used."""


def main(arguments: list[str]) -> None:
    """Run the command in `arguments`, whose first element is the program's name."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # deprecations in dependencies do not concern operators of a server
    if arguments[1:] in (["--version"], ["version"]):  # Django would print its own version
        print(version())
        return
    if arguments[1:] in ([], ["help"], ["--help"], ["-h"]):
        print(help_text(Path(arguments[0]).name))
        return
    if arguments[1:] and arguments[1] in WITHOUT_DJANGO:
        command = import_module(WITHOUT_DJANGO[arguments[1]])
        sys.exit(command.main(arguments[0], arguments[2:]))
    if arguments[1:2] in (["serve"], ["web"], ["reconcile"]) and not {"-h", "--help"} & set(arguments):
        _warn_of_unknown_settings()
    if arguments[1:2] == ["serve"]:
        _take_settings(arguments[2:])
    _execute(arguments)


def _warn_of_unknown_settings() -> None:
    """Say on standard error which variables look like settings and are none."""
    from config.unknown_settings import unknown_settings

    for name, meant in unknown_settings(os.environ).items():
        print(f"warning: {name}: unknown setting{f'; did you mean {meant}?' if meant else ''}", file=sys.stderr)


def _execute(arguments: list[str]) -> None:
    """Run a command of Django's. Exit if settings or the database cannot be used, which commands of others do not expect."""
    from config.options import get_options
    from config.refusals import UnusableSettings, read_settings, registry_refused

    # Any command may make the database or a file with secrets; only the owner may read them.
    os.umask(0o077)
    try:
        read_settings()
    except UnusableSettings as error:
        for line in error.lines:
            print(f"error: {line}", file=sys.stderr)
        sys.exit(INVALID_SETTINGS)
    from django.core.management import execute_from_command_line
    from django.db import OperationalError, ProgrammingError

    try:
        execute_from_command_line(arguments)
    except (OperationalError, ProgrammingError) as error:
        if "--traceback" in arguments:
            raise
        options = get_options()
        print(f"error: {registry_refused(error, options.data_dir, options.database_url)}", file=sys.stderr)
        sys.exit(1)


def _take_settings(arguments: list[str]) -> None:
    """Take the settings that `serve` has as flags; exit if one is out of range."""
    from pydantic import ValidationError

    from config.options import get_options
    from config.refusals import settings_refused
    from config.serve_flags import apply_flags

    flags = apply_flags(arguments)
    try:
        get_options()
    except ValidationError as error:
        for line in settings_refused(error, flags):
            print(f"error: {line}", file=sys.stderr)
        sys.exit(INVALID_SETTINGS)
