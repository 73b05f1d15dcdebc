"""Django's command line with this server's settings and version; `manage.py` and the installed `dragoman` share it."""

from __future__ import annotations

import os
import sys
import warnings

from config.installation import version


def main(arguments: list[str]) -> None:
    """Run the command in `arguments`, whose first element is the program's name."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # deprecations in dependencies do not concern operators of a server
    if arguments[1:] in (["--version"], ["version"]):  # Django would print its own version
        print(version())
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    if arguments[1:2] == ["serve"]:
        _take_settings(arguments[2:])
    from django.core.management import execute_from_command_line

    execute_from_command_line(arguments)


def _take_settings(arguments: list[str]) -> None:
    """Take the settings that `serve` has as flags; exit if one is out of range."""
    from pydantic import ValidationError

    from config.options import get_options
    from config.serve_flags import apply_flags, flag_of

    apply_flags(arguments)
    try:
        get_options()
    except ValidationError as error:
        for each in error.errors():
            name = flag_of(str(each["loc"][0])) if each["loc"] else "settings"
            print(f"error: {name}: {each['msg']}", file=sys.stderr)
        sys.exit(2)
