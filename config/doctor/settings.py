"""The checks of settings: values, names, what dialects' own files say, and telemetry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pydantic import ValidationError

from config.doctor.finding import Finding, error, ok, warning
from config.options import Options
from config.refusals import settings_refused
from config.telemetry import TelemetryError, exports
from config.unknown_settings import unknown_settings
from inference.dialects import declared_dialects
from inference.planes.declaration import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.planes.declaration import Setup

CHECK = "settings"


def check_values() -> tuple[Options | None, list[Finding]]:
    """The settings, or None if the server would refuse them."""
    try:
        options = Options()
    except ValidationError as problem:
        return None, refusals(problem)
    return options, [ok(CHECK, "all values are valid")]


def refusals(problem: ValidationError) -> list[Finding]:
    """A finding for each refused setting, without its value, which may be a secret."""
    return [error(CHECK, line) for line in settings_refused(problem)]


def check_names(environment: Mapping[str, str]) -> list[Finding]:
    """Variables that look like settings and are none."""
    found = unknown_settings(environment)
    return [
        warning(CHECK, f"{name} is no setting", f"did you mean {meant}?" if meant else "")
        for name, meant in found.items()
    ]


def check_dialects(options: Options) -> tuple[list[Setup], list[Finding]]:
    """The configured dialects, and what is wrong with the others."""
    setups, findings = [], []
    for dialect in declared_dialects():
        try:
            setups.append(dialect.set_up(options))
        except ValidationError as problem:
            findings += refusals(problem)
        except SetupError as problem:
            findings.append(error(CHECK, f"{dialect.title}: {problem}"))
    return setups, findings


def check_telemetry(options: Options, environment: Mapping[str, str]) -> list[Finding]:
    """Whether traces and metrics can be exported, if the variables ask for it."""
    try:
        signals = [
            signal.lower()
            for signal, endpoint in (("TRACES", options.otlp_traces_endpoint), ("METRICS", ""))
            if exports(signal, environment, endpoint)
        ]
        if signals:
            importlib.import_module("opentelemetry.exporter.otlp.proto.http")
    except TelemetryError as problem:
        return [error("telemetry", str(problem))]
    except ImportError as problem:
        return [error("telemetry", f"{problem.name} is not installed", "install dragoman[otel]")]
    return [ok("telemetry", f"{' and '.join(signals)} are exported" if signals else "off")]
