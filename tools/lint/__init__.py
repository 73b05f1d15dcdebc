"""Contracts of import-linter."""
