"""A profile with what the command line says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from loadtests.plan import Profile
    from loadtests.settings import RunSettings


def sized(profile: Profile, run: RunSettings) -> Profile:
    """Other seconds for a stage (and the whole soak), and so many users at most where a shape needs no more."""
    if run.seconds:
        profile = replace(profile, stage_s=run.seconds, soak_s=run.seconds)
    if run.users:
        fewer = tuple(users for users in profile.users if users < run.users)
        profile = replace(profile, users=(*fewer, run.users), places=min(profile.places, run.users))
    return profile
