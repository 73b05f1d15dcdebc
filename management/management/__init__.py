"""The package of management commands, as Django expects it."""
