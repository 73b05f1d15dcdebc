"""Why a change to a registry was refused."""

from __future__ import annotations


class RegistryError(Exception):
    """The change is not possible; the text says why and names the field."""
