"""Where a worker may run, as a launcher of several machines understands it. It knows no deployment and no prices (`management.places`)."""

from __future__ import annotations

import msgspec

MARKET, ACCELERATOR, PROVIDER, REGION = "market", "accelerator", "provider", "region"
NODE_TYPE, ON_PREM_ID = "node-type", "onprem-node-id"
HOST = "worker-host"
"""Labels of machines. An operator gives them where a machine joins; HOST is the name in its certificate, if that is not its address."""


class Place(msgspec.Struct, frozen=True):
    """A worker's needs of a machine."""

    choices: tuple[dict[str, str], ...] = ({},)
    """Labels that the machine must have, the preferred choice first: "a", "!a" or "in(a,b)". None: no machine is allowed."""
    gpus: int = 0
    """Accelerators, all on one machine."""
    most_per_hour: float = 0.0
    """USD that the dearest of the choices costs, if there is a limit; else 0."""


ANYWHERE = Place()
