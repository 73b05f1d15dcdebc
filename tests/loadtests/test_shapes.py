"""Plans name users that there are, and stages that come before those that need them."""

from __future__ import annotations

import re

import pytest

from loadtests.catalogue import FIGURES
from loadtests.plan import PROFILES
from loadtests.settings import RunSettings
from loadtests.shapes import DIALECTS, SHAPES, SUITE
from loadtests.sizes import sized
from tests.conftest import ROOT

USERS = {
    name
    for path in (ROOT / "loadtests" / "users").glob("*.py")
    for name in re.findall(r"^class ([A-Z]\w+User)\(", path.read_text(), re.M)
}
IN_LOCUSTFILE = set(re.findall(r"\b\w+User\b", (ROOT / "loadtests" / "locustfile.py").read_text()))
MOST_OF_A_REQUEST = 64
"""Prompts of one request that the server takes."""


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_makes_sense(name, profile):
    shape = SHAPES[name]
    assert set(shape.figures) <= set(FIGURES)
    stages = shape.plan(PROFILES[profile]).stages
    assert len({stage.name for stage in stages}) == len(stages)
    for number, stage in enumerate(stages):
        assert set(stage.classes) <= USERS & IN_LOCUSTFILE
        assert stage.seconds > 0
        if stage.users:
            assert stage.users >= len(stage.classes), "each class has a user"
        if stage.times:
            assert stage.times_of in [before.name for before in stages[:number]]
            assert stage.users
        if "EngineUser" in stage.classes:
            assert 0 < stage.work.turns <= MOST_OF_A_REQUEST


def test_there_are_users_of_every_dialect():
    sources = (ROOT / "inference" / "dialects").iterdir()
    dialects = {folder.name for folder in sources if (folder / "dialect.py").exists()}
    assert {path.stem for path in (ROOT / "loadtests" / "users").glob("*.py")} >= dialects
    assert "soak" not in SUITE


def test_the_command_line_changes_sizes():
    profile = PROFILES["cpu-small"]
    run = RunSettings("ramp", "cpu-small", "x", seconds=3, users=6)
    assert sized(profile, run).users == (1, 2, 4, 6)
    assert (sized(profile, run).stage_s, sized(profile, run).soak_s) == (3, 3)
    assert sized(profile, RunSettings("ramp", "cpu-small", "x")) == profile
    assert [stage.users for stage in SHAPES["dialects"].plan(sized(profile, run)).stages][-1] == len(DIALECTS)
