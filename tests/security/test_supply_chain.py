"""What is installed: exact versions with the hashes of their files, from one index, and none with a fault that is known."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.conftest import ROOT

pytestmark = pytest.mark.smoke

LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
AT_LEAST = {
    "channels": "4.3.0", "daphne": "4.2.2", "django": "5.2.11", "djangorestframework": "3.15.2",
    "h2": "4.3.0", "jinja2": "3.1.6", "protobuf": "6.31.1", "safetensors": "0.5.0", "torch": "2.10.0", "twisted": "24.7.0",
}  # fmt: skip
"""The first versions without the faults that advisories tell of: daphne CVE-2026-44545, django CVE-2025-14550, jinja2
CVE-2025-27516, protobuf CVE-2025-4565, torch CVE-2025-32434 and CVE-2026-24747, twisted CVE-2024-41671, h2 CVE-2025-57804."""


def requirements(text: str) -> list[str]:
    """Each requirement of a lock file with its hashes, on one line."""
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_package_is_locked_with_the_hashes_of_its_files(lock):
    found = requirements(lock.read_text())
    assert found
    for line in found:
        assert not line.startswith(("--extra-index-url", "--index-url", "--find-links", "-e", "git+")), line
        assert re.match(r"[\w.\[\]-]+==[\w.!+]+ ", line), line
        assert "--hash=sha256:" in line, line


def test_the_installer_asks_for_the_hashes():
    text = (ROOT / "tools" / "release" / "install.py").read_text()
    assert "--require-hashes" in text
    assert "--extra-index-url" not in text


@pytest.mark.parametrize("name", AT_LEAST)
def test_no_version_with_a_known_fault_is_installed(name):
    locked = {
        line.partition("==")[0].partition("[")[0].lower(): line.partition("==")[2].split()[0]
        for line in requirements((ROOT / "requirements" / "dev.lock").read_text())
    }
    if name in locked:
        assert Version(locked[name]) >= Version(AT_LEAST[name])
    else:  # torch is installed by its exact version
        assert name == "torch"
        assert Version(version(name)) >= Version(AT_LEAST[name])
