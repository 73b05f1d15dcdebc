"""The folders of this process's control groups and of their ancestors, whose limits it shares. Reads /proc alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc/self")


def folders(controller: str, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """The version, 1 or 2, and the folder of each group that may have this controller's limits, the innermost first.

    `proc` is the folder of the process in /proc, of which `cgroup` and `mountinfo` are read.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    # Lines are `hierarchy:controllers:path`; version 2 has hierarchy 0 and names no controllers.
    paths: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in mounts:
        # See proc_pid_mountinfo(5): field 4 is the root, 5 the mount point; type and options follow " - ".
        fields, _, rest = line.partition(" - ")
        root, mount_point = (_unescaped(field) for field in fields.split()[3:5])
        kind, *_, options = rest.split()
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        for folder in _with_parents(Path(mount_point), root, paths[kind]):
            yield 2 if kind == "cgroup2" else 1, folder


def _unescaped(field: str) -> str:
    """A path of mountinfo with its octal escapes replaced."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _with_parents(mount_point: Path, root: str, path: str) -> list[Path]:
    """The folder of the group `path`, if the group `root` is mounted at `mount_point`, and its parents up to there."""
    below = path.removeprefix(root.rstrip("/")) if path == root or path.startswith(root.rstrip("/") + "/") else ""
    parts = [part for part in below.split("/") if part]
    if ".." in parts:  # the group is outside of the mounted part
        parts = []
    return [mount_point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
