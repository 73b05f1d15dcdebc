"""Prometheus metrics, under the names that dashboards query."""
