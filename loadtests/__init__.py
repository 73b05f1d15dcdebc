"""Load tests: clients of a running server. They import nothing of the server."""
