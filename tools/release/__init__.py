"""Installs, builds the demo model, and carries out the Dockerfile without Docker."""
