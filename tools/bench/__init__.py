"""Benchmarks of parts of the server; `benchmarks/` compares the whole server with its peers."""
