"""The addresses on which the server would listen, by its settings and those of the dialects. It builds and binds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from config.options import Options
    from inference.planes.declaration import Setup

Address = tuple[str, int]


def settings_of_addresses(options: Options, setups: Iterable[Setup]) -> dict[Address, str]:
    """The settings that give the port of each address."""
    found: dict[Address, list[str]] = {}
    own = {
        "DRAGOMAN_FRONT_PORT": (options.host, options.front_port),
        "DRAGOMAN_CONTROL_PORT": (options.host, options.control_port),
    }
    for addresses in (own, *(setup.addresses for setup in setups)):
        for setting, (host, port) in addresses.items():
            if port:
                found.setdefault((host, port), []).append(setting)
    return {address: ", ".join(settings) for address, settings in found.items()}
