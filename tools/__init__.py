"""Benchmarks of parts, vendors' suites, generated pages, and what builds a release. No server imports it."""
