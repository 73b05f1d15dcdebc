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
    from django.core.management import execute_from_command_line

    execute_from_command_line(arguments)
