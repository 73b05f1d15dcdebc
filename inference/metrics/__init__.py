"""Metrics in the Prometheus format, under the names that dashboards query."""
