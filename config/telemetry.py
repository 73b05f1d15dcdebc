"""OpenTelemetry by its standard variables (OTEL_*), off without an endpoint. The packages are those of the extra `otel`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from config.installation import version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from inference.telemetry.spans import OpenTelemetry

SERVICE = "dragoman"
PROTOCOL = "http/protobuf"


class TelemetryError(ValueError):
    """What the variables ask for cannot be done; the text names the variable."""


def exports(signal: str, environment: Mapping[str, str], endpoint: str = "") -> bool:
    """Whether a signal, TRACES or METRICS, is exported: an endpoint is named, and no variable switches it off. Raises
    TelemetryError.
    """
    named = (
        endpoint
        or environment.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    exporter = environment.get(f"OTEL_{signal}_EXPORTER", "") or "otlp"
    if not named or environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter != "otlp":
        raise TelemetryError(f"OTEL_{signal}_EXPORTER must be otlp or none, got {exporter!r}")
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if environment.get(name)), None)
    if name is not None and environment[name] != PROTOCOL:
        raise TelemetryError(f"{name} must be {PROTOCOL}, got {environment[name]!r}")
    return True


def telemetry_of(traces_endpoint: str, environment: Mapping[str, str] = os.environ) -> OpenTelemetry | None:
    """What the variables ask for; None: nothing. `traces_endpoint` comes before the variables. Raises TelemetryError."""
    traces, metrics = exports("TRACES", environment, traces_endpoint), exports("METRICS", environment)
    if not traces and not metrics:
        return None
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        from inference.telemetry.spans import OpenTelemetry

        own = Resource({"service.name": SERVICE, "service.version": version()})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before our own names.
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        return OpenTelemetry(
            _tracers(resource, traces_endpoint) if traces else None, _meters(resource) if metrics else None
        )
    except ImportError as error:
        raise TelemetryError(f"OTEL_*: {error.name} is not installed; install dragoman[otel]") from error


def _tracers(resource: Resource, endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    return provider


def _meters(resource: Resource) -> MeterProvider:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)
