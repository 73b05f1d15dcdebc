"""What a load is: stages one after another, each with users, the work that they ask for, and the way in which they arrive."""

from __future__ import annotations

import msgspec

ALONE = "alone"
"""The stage of one user, which says what an unloaded server takes for a first token and between tokens."""
ENGINE = "engine"
"""The stage of large whole answers, which says how many tokens the engine makes at this concurrency."""


class Work(msgspec.Struct, frozen=True):
    """The requests of a stage."""

    prompt_words: int = 40
    output_tokens: int = 48
    common_words: int = 0
    """Words that all prompts begin with."""
    adapters: tuple[str, ...] = ()
    """Taken in turn; "" is the model itself."""
    turns: int = 0
    """Of a conversation that grows; a new one begins after so many."""


class Stage(msgspec.Struct, frozen=True):
    """A time with a number of users of these classes, which Locust shares among them.

    With `times` the loop is open: requests arrive at random, at `times` the rate of requests that the stage `times_of` has had
    answered, whatever becomes of those before. Else each user sends its next request when the last one has been answered.
    """

    name: str
    seconds: float
    users: int
    classes: tuple[str, ...]
    work: Work = Work()
    times: float = 0.0
    times_of: str = ""
    pause_s: float = 0.0
    """Between a user's requests, in a closed loop."""
    once: bool = False
    """Each user sends one request; the stage ends when all have been answered, or after `seconds`."""
    asleep: bool = False
    """The server's deployment is put to sleep before."""
    kill_every_s: float = 0.0
    """An engine worker of a server of this machine is killed so often."""
    watched: bool = False
    """Memory and descriptors of a server of this machine are sampled."""
    may_refuse: bool = False
    """Refusals are no failures."""


class Plan(msgspec.Struct, frozen=True):
    """The stages of a shape, and the settings of a server that is started for it."""

    stages: tuple[Stage, ...]
    settings: dict[str, str] = {}

    def stage(self, name: str) -> Stage:
        """By its name; raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)


class Profile(msgspec.Struct, frozen=True):
    """How much load a kind of machine gets."""

    users: tuple[int, ...]
    """Of the ramp's steps."""
    stage_s: float
    places: int
    """Requests that a server takes at once where it is overloaded."""
    work: Work = Work()
    long_words: int = 500
    soak_s: float = 60

    @property
    def most(self) -> int:
        """The users of shapes with one step."""
        return self.users[-1]


PROFILES = {
    "cpu-small": Profile(users=(1, 2, 4, 8, 16), stage_s=6, places=16),
    "cpu": Profile(users=(1, 4, 8, 16, 32), stage_s=15, places=32, work=Work(output_tokens=96)),
    "gpu": Profile(
        users=(1, 8, 32, 64, 128, 256), stage_s=20, places=256, work=Work(prompt_words=200, output_tokens=128)
    ),
}
