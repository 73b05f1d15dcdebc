"""The data plane over fake workers and the registries are those of the fast tests."""

from tests.unit.conftest import serving, sockets, start
from tests.unit.management.conftest import deployment

__all__ = ["deployment", "serving", "sockets", "start"]
