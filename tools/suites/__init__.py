"""Runs vendors' own tests and clients, unmodified, against this server."""
