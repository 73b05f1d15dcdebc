"""The registries' fixtures are those of the fast tests."""

from tests.unit.management.conftest import deployment

__all__ = ["deployment"]
