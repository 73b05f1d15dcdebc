"""The wheel of this source tree, built as a clone would build it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def source_files() -> list[str]:
    """What a clone would have, and files that are new."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def build_wheel(folder: Path) -> Path:
    """Build it in this folder, without the network."""
    tree, built = folder / "tree", folder / "built"
    for name in source_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(built), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = built.iterdir()
    return file
