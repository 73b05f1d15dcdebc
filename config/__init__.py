"""Assembles the server. Imports all other packages and is imported by none."""
