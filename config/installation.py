"""Paths and version of the installation, in a source tree and in a wheel."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder of our packages: the source tree, or in a wheel the folder `dragoman` of site-packages (see `setup.py`).
"""
PROJECT = ROOT / "pyproject.toml"
"""Exists only in a source tree."""
DATABASE = "dragoman.sqlite3"
"""The name of the SQLite file in the data folder."""
DEMO_MODEL = ROOT / "models" / "demo"
DEMO_ADAPTERS = ROOT / "models" / "demo-adapters"


def default_data_dir() -> Path:
    """`var` in a source tree. An installed server writes nothing next to its code: `dragoman` in the user's data
    folder (https://specifications.freedesktop.org/basedir-spec/latest/).
    """
    if PROJECT.is_file():
        return ROOT / "var"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "dragoman"


def runtime_dir(data_dir: Path) -> Path:
    """The folder of sockets that this user's processes of one data folder share. A Unix socket's path is short, so it is not
    below the data folder. Raises OSError if it cannot be made, or is another user's.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    place = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:12]
    folder = Path(base) / f"dragoman-{os.getuid()}-{place}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"{folder} cannot be made: {error.strerror}; set DRAGOMAN_RUNTIME_DIR") from error
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} must be a folder of this user that nobody else can enter")
    return folder


def version() -> str:
    """The version in pyproject.toml: read directly in a source tree, from the installed metadata elsewhere."""
    if PROJECT.is_file():
        return str(tomllib.loads(PROJECT.read_text())["project"]["version"])
    return metadata.version("dragoman")
