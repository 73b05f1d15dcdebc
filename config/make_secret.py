"""`makesecret`: writes random secrets into files that do not exist yet, before a server or its database first starts.

It prints no secret and changes no file that is there.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial
from pathlib import Path

from management.generated import generated

BYTES = 32
MODE = 0o640
"""The owner writes; others read it as members of the owner's group, such as the users of other containers."""


def main(program: str, arguments: list[str]) -> int:
    """`makesecret FILE[=TEXT]...`: the exit status is 0, or 1 if a file cannot be made."""
    parser = argparse.ArgumentParser(prog=f"{program} makesecret", description=__doc__)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE[=TEXT]",
        help="A file for a new secret; with TEXT it gets that text, in which {} is the secret of the file before it.",
    )
    secret = ""
    for argument in parser.parse_args(arguments).files:
        name, has_text, text = argument.partition("=")
        path = Path(name)
        if has_text and (not secret or "{}" not in text):
            parser.error(f"{name}: a text needs {{}}, and a file before it")
        wanted = text.replace("{}", secret) if has_text else secrets.token_urlsafe(BYTES)
        existed = path.exists()
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            found = generated(path, partial(str, wanted), MODE)
        except OSError as error:
            print(f"error: {path} cannot be made: {error.strerror}", file=sys.stderr)
            return 1
        if has_text and found != wanted:
            print(f"error: {path} has another secret than the file before it: remove one of them", file=sys.stderr)
            return 1
        secret = secret if has_text else found
        print(f"{path} {'is there' if existed else 'is made'}")
    return 0
