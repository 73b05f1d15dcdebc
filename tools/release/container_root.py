"""Carries out the Dockerfile's steps without Docker, in roots made by debootstrap, and starts what comes out of them.

    python -m tools.release.container_root FOLDER [--start]

Debian's own Python stands for the base image's. It needs root, debootstrap and the network; `--bind` shows the steps
further paths of this machine, such as a mirror of the package index, and `--env` further variables. It prints the size
of the result, and with `--start` the times until the server is healthy and until its first token.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.dockerfile import Image, Instruction, Stage, chain, expand, image_of, read_stages

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,python3,python3-venv"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
ASK = """
import sys, urllib.request
headers = {"content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", sys.argv[1].encode(), headers)
next(line for line in urllib.request.urlopen(request) if b'"content"' in line)
"""
"""Ends with the first token."""
READY_S = 900


def main() -> None:
    """Build, measure, start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Where the roots are made; kept for the next run.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--target", default="", help="A stage; default: the last one.")
    parser.add_argument("--mirror", default=MIRROR, help="Debian's mirror.")
    parser.add_argument(
        "--bind", action="append", default=[], type=Path, help="A path that the steps see; may be repeated."
    )
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the steps; may be repeated.")
    parser.add_argument("--reuse", action="store_true", help="Build nothing: take the roots of an earlier run.")
    parser.add_argument("--start", action="store_true", help="Start the server with a read-only root, and ask it.")
    options = parser.parse_args()
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("root and debootstrap are needed")
    stages = read_stages(ROOT / "Dockerfile", {"DEVICE": options.device})
    build = Build(options.folder.resolve(), options.mirror, options.bind, options.env, stages)
    began = time.monotonic()
    name = options.target or stages[-1].name
    if options.reuse:
        root = build.root(name)
    else:
        root = build.stage(name)
        print(f"built in       {time.monotonic() - began:8.0f} s")
    for what, path in (("image", root), ("base", build.base()), ("environment", root / "opt" / "dragoman")):
        print(f"{what:14} {size_bytes(path) / 1e6:8.0f} MB")
    if options.start:
        start(root, image_of(stages, options.target), options.folder.resolve() / "data")


class Build:
    """The roots of all stages, each made once."""

    def __init__(self, folder: Path, mirror: str, binds: list[Path], variables: list[str], stages: list[Stage]) -> None:
        self.folder, self.mirror, self.binds, self.variables = folder, mirror, binds, variables
        self.stages = {stage.name: stage for stage in stages}
        self._all = stages
        self.done: dict[str, Path] = {}

    def base(self) -> Path:
        """Debian with Python, as small as debootstrap makes it."""
        root = self.folder / "base"
        if not (root / "usr" / "local" / "bin" / "python").is_symlink():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), self.mirror])
            shutil.rmtree(root / "var" / "cache" / "apt", ignore_errors=True)
            shutil.rmtree(root / "var" / "lib" / "apt" / "lists", ignore_errors=True)
            (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        return root

    def root(self, name: str) -> Path:
        """Where the root of a stage is."""
        return self.folder / f"stage-{name}"

    def stage(self, name: str) -> Path:
        """The root of a stage, with everything that it copies from."""
        if name in self.done:
            return self.done[name]
        stage = self.stages[name]
        origin = self.stage(stage.base) if stage.base in self.stages else self.base()
        root = self.root(name)
        shutil.rmtree(root, ignore_errors=True)
        run(["cp", "-a", "--reflink=auto", str(origin), str(root)])
        print(f"== {name} (from {stage.base})", flush=True)
        inherited = image_of([*chain(self._all, name)][:-1]) if stage.base in self.stages else Image()
        environment, folder = dict(inherited.environment), inherited.folder
        for step in stage.instructions:
            values = {**stage.arguments, **environment}
            if step.keyword == "ENV":
                environment |= dict(word.split("=", 1) for word in Instruction("ENV", expand(step.value, values)).words)
            elif step.keyword == "WORKDIR":
                folder = step.value
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.keyword == "COPY":
                self._copy(root, folder, step)
            elif step.keyword == "RUN":
                print(f"-- {step.value}", flush=True)
                self._run(root, folder, values, step.value)
        self.done[name] = root
        return root

    def _copy(self, root: Path, folder: str, step: Instruction) -> None:
        *sources, target = step.words
        place = root / (target if target.startswith("/") else f"{folder}/{target}").lstrip("/")
        if "from" in step.flags:
            [source] = sources
            found = self.stage(step.flags["from"]) / source.lstrip("/")
            shutil.rmtree(place, ignore_errors=True)
            run(["cp", "-a", "--reflink=auto", str(found), str(place)])
            return
        for name in sources:
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                if not in_context(name):
                    sys.exit(f"{name} is not in the build's context (.dockerignore)")
                into = place / path.name if target.endswith("/") else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def _run(self, root: Path, folder: str, values: dict[str, str], command: str) -> None:
        """In a chroot and a mount namespace of its own, so that nothing stays mounted."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        pairs = [f"{name}={value}" for name, value in {"PATH": path, "HOME": "/root", **values}.items()]
        inner = ["env", "-i", f"--chdir={folder}", *pairs, *self.variables, "sh", "-c", command]
        run(
            [
                "unshare",
                "--mount",
                "bash",
                "-ec",
                "\n".join([*mounts(root, self.binds), f"exec chroot {root} {shlex.join(inner)}"]),
            ]
        )


def mounts(root: Path, binds: Iterable[Path]) -> list[str]:
    """Commands that mount what a container has, and these paths."""
    lines = ["mount --make-rprivate /", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"), *binds):
        target = f"{root}{path}"
        make = f"mkdir -p {target}" if path.is_dir() else f"mkdir -p {root}{path.parent} && touch {target}"
        lines.append(f"{make} && mount --bind {path} {target} && mount -o remount,bind,ro {target}")
    return lines


def in_context(name: str) -> bool:
    """Whether .dockerignore lets a file in."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in kept)


def size_bytes(path: Path) -> int:
    """The bytes of all files, each counted once."""
    return int(subprocess.run(["du", "-sbx", str(path)], check=True, capture_output=True, text=True).stdout.split()[0])


def start(root: Path, image: Image, data: Path) -> None:
    """Run the image's command as its user, with a read-only root and no capabilities, twice: on a new volume and again."""
    uid, _, gid = image.user.partition(":")
    for what in ("first start", "second start"):
        if what == "first start":
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir(mode=0o750)
            os.chown(data, int(uid), int(gid))
        process, enter = launch(root, image, data)
        began = time.monotonic()
        try:
            while subprocess.run([*enter(), *image.health], capture_output=True).returncode:
                if process.poll() is not None or time.monotonic() - began > READY_S:
                    sys.exit(f"{what}: the server is not healthy; its log is {data / 'log'}")
                time.sleep(1)
            healthy_s = time.monotonic() - began
            asked = subprocess.run(
                [*enter(), "python", "-c", ASK, json.dumps(QUESTION)], capture_output=True, text=True
            )
            if asked.returncode:
                sys.exit(asked.stderr)
            first_s = time.monotonic() - began
        finally:
            inner(process).send_signal(getattr(signal, image.stop_signal))
            status = process.wait(90)
        print(f"{what:14} {healthy_s:8.1f} s healthy, {first_s:.1f} s to the first token, exit status {status}")


def launch(root: Path, image: Image, data: Path):  # type: ignore[no-untyped-def]
    """The process, and what puts a command into its container."""
    variables = image.environment | {"DRAGOMAN_ALLOW_PLAIN_TEXT": "true", "DRAGOMAN_REQUIRE_API_KEY": "false"}
    uid, _, gid = image.user.partition(":")
    locked = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", "--bounding-set=-all",
              "--inh-caps=-all", "env", "-i", f"--chdir={image.folder}", *(f"{k}={v}" for k, v in variables.items())]  # fmt: skip
    lines = [
        "ip link set lo up", "mount --make-rprivate /", f"mount --rbind {root} {root}", f"mount --rbind /dev {root}/dev",
        f"mount -t proc proc {root}/proc", f"mount -t tmpfs -o mode=1777 tmp {root}/tmp", f"mount --bind {data} {root}/data",
        f"mount -o remount,bind,ro {root}",
        f"exec chroot {root} {shlex.join([*locked, *image.entrypoint, *image.command])}",
    ]  # fmt: skip
    with (data / "log").open("ab") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "bash", "-ec", "\n".join(lines)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def enter() -> list[str]:
        return ["nsenter", "-t", str(inner(process).pid), "--mount", "--pid", "--net", "--root", "--wd=/", *locked]

    return process, enter


def inner(process: subprocess.Popen[bytes]):  # type: ignore[no-untyped-def]
    """The first process in the container."""
    import psutil

    deadline = time.monotonic() + 10
    while not (found := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found[0]


def run(command: list[str]) -> None:
    """Run, or end with its status."""
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
