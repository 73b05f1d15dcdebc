"""Creates a virtual environment and installs a lock file into it, using only Python's standard library.

    python3 tools/release/install.py DIRECTORY LOCK [--torch [auto|cpu|cuda]]

`--torch` installs the version of torch that pyproject.toml names first; its files differ by platform, so the lock
file leaves it out. `cpu` is the build without CUDA; `cuda` the build with it and its libraries, by a lock file of its own (x86-64); `auto` what
works here. Debian's python3 comes without ensurepip; pip is then fetched from the package index.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA_LOCK = ROOT / "requirements" / "torch-cuda.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")


def main() -> None:
    """Environment, pip, torch, the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--torch", nargs="?", choices=("auto", "cpu", "cuda"), const="auto")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs before anything is installed)
        sys.exit(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}")
    python = options.directory / "bin" / "python"
    if not python.exists():
        say(f"Making {options.directory} ...")
        make_environment(options.directory)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar", "on"]
    if options.torch == "cpu":
        say("Installing torch for CPUs (about 200 MB) ...")
        run([*pip, "--index-url", CPU_INDEX, torch_requirement()])
    elif options.torch == "cuda":
        say("Installing torch and CUDA's libraries (about 3 GB) ...")
        run([*pip, "--require-hashes", "-r", str(CUDA_LOCK)])
    elif options.torch:
        say("Installing torch (about 200 MB) ...")
        run([*pip, torch_requirement()])
    say(f"Installing {options.lock} ...")
    run([*pip, "--require-hashes", "-r", str(options.lock)])
    # Only now: torch cannot be imported without what it depends on.
    if (
        options.torch == "auto"
        and subprocess.run([str(python), "-c", "import torch"], check=False, capture_output=True).returncode
    ):
        say("This build of torch needs CUDA libraries that are not here; installing the one for CPUs ...")
        run([*pip, "--force-reinstall", "--index-url", CPU_INDEX, torch_requirement()])


def make_environment(directory: Path) -> None:
    """A virtual environment with pip, whether or not ensurepip is there."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        venv.create(directory, with_pip=False, symlinks=True)
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch_pip(Path(folder))
            python = str(directory / "bin" / "python")
            run([python, f"{wheel}/pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", str(wheel)])
    else:
        venv.create(directory, with_pip=True, symlinks=True)


def fetch_pip(folder: Path) -> Path:
    """The newest pip wheel of the index, checked against the index's own hash."""
    with urllib.request.urlopen(f"{INDEX}/pip/", timeout=60) as page:
        links = re.findall(r'href="([^"]*?/(pip-[\d.]+-py3-none-any\.whl))#sha256=(\w+)"', page.read().decode())
        base = page.url
    if not links:
        sys.exit(f"{INDEX} offers no pip; install python3-venv instead")
    href, name, digest = max(links, key=lambda link: [int(x) for x in re.findall(r"\d+", link[1].split("-")[1])])
    with urllib.request.urlopen(urllib.parse.urljoin(base, href), timeout=60) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit("the downloaded pip does not match the index's hash")
    (folder / name).write_bytes(data)
    return folder / name


def torch_requirement() -> str:
    """As pyproject.toml has it."""
    found = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        sys.exit("pyproject.toml does not pin torch")
    return found.group(1)


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)


def run(command: list[str]) -> None:
    """Run, or end with its status."""
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
