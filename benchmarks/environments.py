"""Virtual environments of peers, in a cache folder, with pinned versions. Nothing is installed into the project's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class CommandError(Exception):
    """A command that a peer needs has failed; the text ends with what it said last."""


def cache_folder() -> Path:
    """Where peers and models are kept by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "peers"


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run it with its output in `log`; raises CommandError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}, check=False
            )
        except OSError as error:
            raise CommandError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}:\n{tail(log)}")


def said(command: list[str]) -> str:
    """What it prints, to stdout and stderr; raises CommandError."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CommandError(f"{' '.join(command)}: {error}") from error
    return done.stdout.strip()


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-1000:] if log.exists() else ""


class Environment:
    """A virtual environment with exact versions of what `pins` names, extras in brackets included."""

    def __init__(self, folder: Path, pins: dict[str, str]) -> None:
        self.folder, self._pins = folder, pins

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def versions(self, *more: str) -> dict[str, str]:
        """Installed versions of the pinned packages and of `more`; local labels such as +cpu included."""
        command = [self.python, "-c", _VERSIONS, *map(_distribution, self._pins), *more]
        if not Path(self.python).exists():
            return {}
        # Warnings may come before it.
        found: dict[str, str] = json.loads(said(command).splitlines()[-1])
        return found

    def complete(self) -> bool:
        """Whether all pinned versions are there."""
        found = self.versions()
        return all(found.get(_distribution(name), "").partition("+")[0] == pin for name, pin in self._pins.items())

    def install(self, log: Path) -> None:
        """Make what is missing; raises CommandError. torch comes from its index for CPUs, if that can be reached."""
        if self.complete():
            return
        run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)], log)
        if torch := self._pins.get("torch"):
            short = ["--retries", "0", "--timeout", "10", "--index-url", CPU_INDEX]
            try:
                self._pip(log, "install", *short, f"torch=={torch}")
            except CommandError:
                self._pip(log, "install", f"torch=={torch}")
        self._pip(log, "install", *(f"{name}=={version}" for name, version in self._pins.items()))

    def remove(self, log: Path, *names: str) -> None:
        """Uninstall those that are there."""
        if there := set(names) & self.versions(*names).keys():
            self._pip(log, "uninstall", "--yes", *sorted(there))

    def _pip(self, log: Path, *arguments: str) -> None:
        # The interpreter's own pip, because a Python without ensurepip makes environments without one.
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        run([*pip, *arguments], log)


def _distribution(requirement: str) -> str:
    """The name without extras."""
    return requirement.partition("[")[0]
