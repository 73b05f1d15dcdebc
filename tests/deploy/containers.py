"""Runs services of the compose file as local processes, locked up as their containers would be: a root of their own that is
read-only, the numeric user without capabilities, volumes as folders, one network for all. It needs root, and no Docker.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.deploy.compose import Service
from tests.postgresql import binaries
from tests.waiting import wait_until

START_S = 240
OTHERS = {"postgres": "registry", "redis": "rates"}
"""Services with other images that run here too, each with its volume."""
OTHERS_OWNER = 999
"""Who owns the folders of those images where the volumes are mounted."""
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "chroot")
ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "ssl",
    "ca-certificates",
)
ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\npostgres:x:999:999::/var/lib/postgresql:/bin/sh\ndragoman:x:10001:10001::/data:/bin/sh\n"
FOLDERS = ("proc", "sys", "dev", "tmp", "etc", "data", "secrets", "opt", "var/lib")


def skip_unless_possible() -> None:
    """Skip where no namespaces can be made."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.getuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")


@dataclass
class Container:
    """A started service."""

    service: Service
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def inner(self) -> psutil.Process:
        """The first process in it."""
        return psutil.Process(self.process.pid).children()[0]

    def stop(self, timeout_s: float = 60) -> int:
        """Stop it as `docker stop` does; returns the exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(IndexError, psutil.NoSuchProcess):
                self.inner.send_signal(getattr(signal, self.service.image.stop_signal))
        return self.process.wait(timeout_s)


@dataclass
class Project:
    """The running services, their volumes and their network. `venv` is what the image has in /opt/dragoman."""

    venv: Path
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dragoman-compose-")))
    containers: dict[str, Container] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.chmod(0o755)
        self._etc = self.folder / "etc"
        self._etc.mkdir()
        self._network = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n"

    def up(self, services: dict[str, Service], names: list[str]) -> None:
        """Start these services and all that they depend on, in the order of their conditions."""
        for name in names:
            if name in self.containers:
                continue
            service = services[name]
            self.up(services, [each for each in service.depends_on if services[each].ours or each in OTHERS])
            for other, condition in service.depends_on.items():
                if other in self.containers:
                    self._await(self.containers[other], condition)
            self.start(service)

    def start(self, service: Service) -> Container:
        """Start one service."""
        log = self.folder / f"{service.name}.log"
        script = self.folder / f"{service.name}.sh"
        script.write_text(self._script(service))
        command = ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", "unshare", "--mount", "--pid", "--uts", "--ipc",
                   "--fork", "--kill-child", "bash", str(script)]  # fmt: skip
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        self.containers[service.name] = Container(service, process, log)
        return self.containers[service.name]

    def exec(
        self, name: str, command: list[str], user: str = "", groups: str = "", **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `docker compose exec` does."""
        return subprocess.run(self.exec_command(name, command, user, groups), capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]

    def exec_command(self, name: str, command: list[str], user: str = "", groups: str = "") -> list[str]:
        container = self.containers[name]
        enter = [
            "nsenter",
            "-t",
            str(container.inner.pid),
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--ipc",
            "--root",
            "--wd=/",
        ]
        return [*enter, *_locked(container.service, command, user, groups)]

    def healthy(self, name: str) -> bool:
        """Whether the service's own health check succeeds now."""
        container = self.containers[name]
        assert container.process.poll() is None, container.log.read_text()
        if not container.service.health:
            return True
        with contextlib.suppress(IndexError):
            return self.exec(name, container.service.health).returncode == 0
        return False

    def down(self) -> None:
        """Stop everything, the last started first, and remove what was made."""
        for container in reversed(self.containers.values()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                container.stop()
            if container.process.poll() is None:
                container.process.kill()
                container.process.wait()
        self._network.kill()
        self._network.communicate()
        shutil.rmtree(self.folder)

    def _await(self, container: Container, condition: str) -> None:
        name = container.service.name
        if condition == "service_completed_successfully":
            assert container.process.wait(START_S) == 0, container.log.read_text()
        elif condition == "service_healthy":
            wait_until(lambda: self.healthy(name), START_S, container.log.read_text, every_s=0.5)

    def volume(self, name: str) -> Path:
        """The folder of a volume."""
        return self.folder / "volumes" / name

    def _mounted(self, service: Service, name: str, target: str) -> Path:
        """The folder of a volume for its mount. A new one has the owner that the image's folder gives it, root if there is none."""
        path = self.volume(name)
        if not path.exists():
            path.mkdir(parents=True)
            owner = service.owners.get(target, 0) if service.ours else OTHERS_OWNER
            os.chown(path, owner, owner)
            path.chmod(0o750 if owner else 0o755)
        return path

    def _script(self, service: Service) -> str:
        root = "/mnt"
        lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs -o mode=755 root {root}"]

        def bind(source: object, target: str, read_only: bool) -> None:
            lines.append(f"mkdir -p {root}{target} && mount --rbind {source} {root}{target}")
            if read_only:
                lines.append(f"mount -o remount,bind,ro {root}{target}")

        lines += [f"mkdir -p {root}/{folder}" for folder in FOLDERS]
        lines += [f"ln -s usr/{name} {root}/{name}" for name in ("bin", "sbin", "lib", "lib64")]
        lines += [f"cp -a /etc/{name} {root}/etc/ 2>/dev/null || true" for name in ETC]
        self._accounts(root, lines)
        # before what is borrowed, which may lie in /tmp
        for text in service.fields.get("tmpfs", []):
            target, _, options = text.partition(":")
            lines.append(f"mkdir -p {root}{target} && mount -t tmpfs -o {options or 'mode=1777'} tmpfs {root}{target}")
        for path in sorted({"/usr", os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)}):
            if path != "/usr" and path.startswith("/usr/"):
                continue
            bind(path, path, True)
        bind(self.venv, "/opt/dragoman", True)
        # /dev/null and its like alone, as in a container
        lines.append(
            f"mount -t tmpfs -o mode=755 dev {root}/dev && mkdir {root}/dev/shm && mount -t tmpfs shm {root}/dev/shm"
        )
        for name in ("null", "zero", "full", "random", "urandom"):
            lines.append(f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}")
        lines += [f"chmod 1777 {root}/dev/shm", f"mount --rbind /sys {root}/sys", f"mount -t proc proc {root}/proc"]
        for source, target, read_only in service.volumes:
            bind(self._mounted(service, source, target), target, read_only)
        if service.fields.get("read_only"):
            lines.append(f"mount -o remount,ro {root}")
        command = _locked(service, _postgres() if service.name == "postgres" else service.command)
        return "\n".join([*lines, f"exec chroot {root} {shlex.join(command)}", ""])

    def _accounts(self, root: str, lines: list[str]) -> None:
        (self._etc / "passwd").write_text(ACCOUNTS)
        (self._etc / "group").write_text("root:x:0:\npostgres:x:999:\ndragoman:x:10001:\n")
        names = "localhost web reconcile postgres redis prometheus grafana"
        (self._etc / "hosts").write_text(f"127.0.0.1 {names}\n")
        lines.append(f"cp {self._etc}/* {root}/etc/")


def _locked(service: Service, command: list[str], user: str = "", groups: str = "") -> list[str]:
    """The command as the service's user, without capabilities, with the service's environment alone."""
    uid, _, gid = (user or service.user).partition(":")
    groups = groups or ",".join(map(str, service.fields.get("group_add", [])))
    locks = [
        "--no-new-privs",
        "--bounding-set=-all",
        "--inh-caps=-all",
        f"--groups={groups}" if groups else "--clear-groups",
    ]
    assert service.fields["cap_drop"] == ["ALL"]
    assert service.fields["security_opt"] == ["no-new-privileges:true"]
    path = f"{binaries()}:/usr/bin:/bin" if service.name == "postgres" else "/usr/bin:/bin"
    environment = {"PATH": path, **service.environment}
    folder = [f"--chdir={service.image.folder}"] if service.ours else []
    pairs = [f"{name}={value}" for name, value in environment.items()]
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", *locks, "env", "-i", *folder, *pairs, *command]


def _postgres() -> list[str]:
    """What the entry point of PostgreSQL's image does with the same variables, on a new volume and on an old one."""
    folder = binaries()
    script = f"""
        set -e
        data=/var/lib/postgresql/data
        if [ ! -s $data/PG_VERSION ]; then
            {folder}/initdb -D $data -U $POSTGRES_USER --pwfile=$POSTGRES_PASSWORD_FILE -A scram-sha-256 -E UTF8 --no-sync
            echo "create database $POSTGRES_DB" | {folder}/postgres --single -D $data postgres
            echo "host all all all scram-sha-256" >> $data/pg_hba.conf
        fi
        exec {folder}/postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/var/run/postgresql -c fsync=off
    """
    return ["sh", "-c", script]
