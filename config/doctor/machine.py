"""The checks of the machine: CPU, devices, disk, open files."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from config.doctor.finding import Finding, error, ok, warning
from config.open_files import reachable_limit, wanted_files
from config.refusals import of_another_user
from engine.process.cpus import usable_cpus

if TYPE_CHECKING:
    from config.options import Options

CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
MIN_FREE_BYTES, USUAL_FREE_BYTES = 100 << 20, 1 << 30
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""See arch_prctl(2) and the kernel's Documentation/arch/x86/xstate.rst."""


def check_cpu(cpu_info: Path = CPU_INFO) -> list[Finding]:
    """What the CPU can do, and whether the system lets programs use its AMX."""
    if platform.machine() != "x86_64":
        return [warning("cpu", f"kernels are tested on x86-64, this is {platform.machine()}")]
    flags = cpu_flags(cpu_info)
    if flags is None:
        return [warning("cpu", f"{cpu_info} cannot be read")]
    found = [name for name in FEATURES if name in flags]
    findings = [ok("cpu", f"{usable_cpus()} usable CPUs with {', '.join(found) or 'none of the known features'}")]
    if "avx2" not in flags:
        findings.append(warning("cpu", "there is no AVX2: inference is slow"))
    elif not {"avx512_bf16", "amx_bf16"} & flags:
        findings.append(ok("cpu", "there is neither AVX512_BF16 nor AMX, which compute prompts faster"))
    if "amx_tile" in flags and not may_use_amx():
        hint = "allow the system call arch_prctl in the container's seccomp profile; Linux must be 5.16 or later"
        findings.append(warning("cpu", "the system does not let programs use AMX", hint))
    return findings


def cpu_flags(cpu_info: Path = CPU_INFO) -> set[str] | None:
    """The features of the first CPU by Linux's names; None if they cannot be read."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return None
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def may_use_amx() -> bool:
    """Whether the system gives this process AMX's registers; it then has them."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0


def check_open_files(options: Options) -> list[Finding]:
    """Whether the limit of open files has room for the connections that the server takes."""
    limit, wanted = reachable_limit(), wanted_files(options)
    if limit >= wanted:
        return [ok("files", f"a process may open {limit:,} files")]
    text = (
        f"a process may open {limit:,} files, and DRAGOMAN_MAX_CONNECTIONS={options.max_connections} needs {wanted:,}"
    )
    hint = (
        "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker), or lower the setting"
    )
    return [warning("files", text, hint)]


def check_devices(options: Options) -> list[Finding]:
    """Whether the configured device is there. torch is imported only where there may be one."""
    files = [path for path in DEVICE_FILES if os.path.exists(path)]
    if options.device == "cpu" or (options.device == "auto" and not files):
        return [ok("gpu", "not used")]
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = options.tensor_parallel_size
    if count >= needed:
        return [ok("gpu", ", ".join(torch.cuda.get_device_name(number) for number in range(count)))]
    if options.device == "cuda" or needed > 1:
        return [error("gpu", f"DRAGOMAN_DEVICE={options.device} needs {needed} CUDA devices, torch finds {count}")]
    hint = "install torch's CUDA build, or set DRAGOMAN_DEVICE=cpu"
    return [warning("gpu", f"{files[0]} exists, but torch finds no CUDA device: workers run on the CPU", hint)]


def check_data_folder(options: Options) -> list[Finding]:
    """Whether the data folder can be written, has room, and keeps its secrets."""
    folder = options.data_dir
    place = existing(folder)
    if not place.is_dir():
        return [error("disk", f"{place} is no folder", "set DRAGOMAN_DATA_DIR")]
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as problem:
        return [error("disk", f"{place} cannot be written: {problem.strerror}", "set DRAGOMAN_DATA_DIR")]
    findings = [check_space(place), *check_owners(folder)]
    for path in (folder / "secret-key", folder / "secrets-key", folder / "admin-password"):
        if path.exists() and path.stat().st_mode & 0o077:
            findings.append(warning("disk", f"others may read {path}", f"chmod 600 {path}"))
    return findings


def can_be_used(folder: Path) -> bool:
    """Whether the data folder and what is in it can be read and written, or the folder be made; its disk may be full."""
    place = existing(folder)
    return place.is_dir() and all(os.access(path, os.R_OK | os.W_OK) for path in (place, *folder.glob("*")))


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def check_owners(folder: Path) -> list[Finding]:
    """Whether this user may use what commands of another one have made in the data folder."""
    own = os.geteuid()
    return [
        error("disk", f"{path} cannot be read and written{of_another_user(path)}", f"chown {own} {path}")
        for path in sorted(folder.glob("*"))
        if not os.access(path, os.R_OK | os.W_OK)
    ]


def check_space(folder: Path) -> Finding:
    """Whether the disk of a folder has room for the database, adapters and logs."""
    free = shutil.disk_usage(folder).free
    text = f"{free >> 20:,} MiB are free at {folder}"
    if free < MIN_FREE_BYTES:
        return error("disk", text)
    return warning("disk", text) if free < USUAL_FREE_BYTES else ok("disk", text)
