"""Connections between hosts: TCP with mutual TLS. It knows no messages; who may connect is decided here, what is said elsewhere."""
