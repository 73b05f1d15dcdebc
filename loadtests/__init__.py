"""Load tests: clients of a running server, and nothing else."""
