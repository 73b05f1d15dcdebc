"""What a list of models shows: each deployment that can be used, once, with the names by which clients reach its
adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from management.snapshot import Snapshot

if TYPE_CHECKING:
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target
    from management.snapshot import AdapterEntry


def usable_models(router: EngineRouter) -> list[tuple[Target, dict[str, AdapterEntry]]]:
    """The deployments that this task may name and that have not failed, each with its adapters by the name that
    resolves to them: their own, or `deployment:adapter` where the bare name is another deployment's.
    """
    snapshot = Snapshot(router.deployments)
    known = {entry.name for entry in snapshot.deployments}
    return [
        (target, {snapshot.listed_adapter(target.entry, adapter): adapter for adapter in target.entry.adapters})
        for target in router.targets
        if target.entry.name in known and (target.responsive or not router.has_failed(target))
    ]
