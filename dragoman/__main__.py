"""`dragoman` and `python -m dragoman`: what `manage.py` is in a source tree."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Make the application's packages importable, before all others of their names, and run the command."""
    here = Path(__file__).resolve().parent
    root = here if (here / "config").is_dir() else here.parent
    sys.path.insert(0, str(root))
    sys.argv[0] = "dragoman"
    from config.command_line import main

    main(sys.argv)


if __name__ == "__main__":
    main()
