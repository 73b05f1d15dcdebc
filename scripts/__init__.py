"""Scripts: install, models, benchmarks."""
