"""Django's command line with this server's settings and version: `manage.py` and the installed `dragoman` are the same."""

from __future__ import annotations

import os
import sys
import warnings

from config.installation import version


def main(arguments: list[str]) -> None:
    """Run the command that `arguments` name; the first of them is the program."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # other people's deprecations say nothing to those who run a server
    if arguments[1:] in (["--version"], ["version"]):  # Django would say its own
        print(version())
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(arguments)
