"""Writes the tables of the documentation that are derived from code."""
