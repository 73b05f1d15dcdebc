"""Runs the checks in their order, each if what it needs is there, and prints what they found.

It runs before Django is set up, because settings that cannot be used are what it may have to report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from config.addresses import settings_of_addresses
from config.doctor import machine, network, settings
from config.doctor.finding import Finding, Level, error, ok
from config.doctor.registry import check_database, check_models, check_secrets
from config.installation import DATABASE
from config.tls import cluster_files, tls_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from config.options import Options
    from inference.planes.declaration import Setup

WORDS = {Level.OK: "ok", Level.WARNING: "warning", Level.ERROR: "error"}
COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.ERROR: "31"}


def main(program: str, arguments: list[str]) -> int:
    """`doctor [--json]`: the exit status is 0, 1 with warnings, 2 with errors."""
    parser = argparse.ArgumentParser(prog=f"{program} doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    as_json = parser.parse_args(arguments).json
    findings = examine()
    worst = max(finding.level for finding in findings)
    print(rendered(findings) if as_json else shown(findings, colours=sys.stdout.isatty()))
    return int(worst)


def examine() -> list[Finding]:
    """All findings. A check whose requirements failed is left out."""
    options, findings = settings.check_values()
    findings += checked("settings", lambda: settings.check_names(os.environ))
    if options is None:
        return [*findings, *checked("cpu", machine.check_cpu)]
    setups, refused = settings.check_dialects(options)
    folder = checked("disk", lambda: machine.check_data_folder(options))
    own = [files for files in (tls_files(options), cluster_files(options)) if files is not None]
    certified = [*own, *(each for setup in setups for each in setup.tls)]
    findings += [
        *refused,
        *checked("telemetry", lambda: settings.check_telemetry(options, os.environ)),
        *folder,
        *checked("ports", lambda: network.check_ports(settings_of_addresses(options, setups))),
        *checked("files", lambda: machine.check_open_files(options)),
        *checked("redis", lambda: network.check_redis(options)),
        *checked("certificates", lambda: network.check_certificates(certified)),
        *checked("cpu", machine.check_cpu),
        *checked("gpu", lambda: machine.check_devices(options)),
    ]
    if machine.can_be_used(options.data_dir):
        findings += checked("database", lambda: registry(options, setups))
    return findings


def registry(options: Options, setups: list[Setup]) -> list[Finding]:
    """The checks of the database, and of models. Django's settings make a data folder and a key in it, so Django is set up
    only if there is a database.
    """
    if not options.database_url and not (options.data_dir / DATABASE).exists():
        found, registered = [ok("database", "there is none yet; the first start makes it")], False
    else:
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
        os.umask(0o077)
        import django

        django.setup(set_prefix=False)
        found, registered = check_database(options)
        if registered:
            found += checked("secrets", lambda: check_secrets(options))
    return [*found, *checked("models", lambda: check_models(options, setups, registered=registered))]


def checked(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a check; one that fails is an error itself."""
    try:
        return check()
    except Exception as problem:  # an outer boundary: a check that fails must not hide the others
        return [error(name, f"the check failed: {type(problem).__name__}: {problem}")]


def rendered(findings: list[Finding]) -> str:
    """The findings as JSON."""
    worst = max(finding.level for finding in findings)
    checks = [{"check": f.check, "level": WORDS[f.level], "text": f.text, "hint": f.hint} for f in findings]
    return json.dumps({"status": WORDS[worst], "checks": checks}, indent=2)


def shown(findings: list[Finding], *, colours: bool) -> str:
    """The findings as lines for people."""
    lines = []
    for finding in findings:
        word = WORDS[finding.level].ljust(8)
        painted = f"\033[{COLOURS[finding.level]}m{word}\033[0m" if colours else word
        lines.append(f"{painted} {finding.check:13} {finding.text}")
        if finding.hint:
            lines.append(f"{'':23}{finding.hint}")
    count = {level: sum(finding.level == level for finding in findings) for level in Level}
    return "\n".join([*lines, "", f"{count[Level.ERROR]} errors, {count[Level.WARNING]} warnings"])
