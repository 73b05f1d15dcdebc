"""Targets that do not make sense are refused with their place, and a target that is not met says so."""

from __future__ import annotations

import pytest

from loadtests.catalogue import FIGURES
from loadtests.plan import PROFILES
from loadtests.shapes import SHAPES
from loadtests.targets import TargetsError, judged, load_targets
from tests.conftest import ROOT
from tests.loadtests.runs import ramp

SHIPPED = ROOT / "loadtests" / "targets.toml"


@pytest.mark.parametrize("profile", PROFILES)
def test_the_shipped_targets_bound_every_figure_of_every_shape(profile):
    targets = load_targets(SHIPPED, profile, SHAPES)
    for name, shape in SHAPES.items():
        assert set(targets[name]) == set(shape.figures)


def test_each_profile_demands_as_much_as_the_one_before_it_and_more_of_something():
    before, *larger = (load_targets(SHIPPED, profile, SHAPES) for profile in PROFILES)
    for targets in larger:
        pairs = [(name, targets[shape][name], before[shape][name]) for shape in SHAPES for name in targets[shape]]
        assert all(own >= less if FIGURES[name].at_least else own <= less for name, own, less in pairs)
        assert any(own != less for _, own, less in pairs)
        before = targets


def test_a_profile_has_the_targets_of_the_one_before_it_unless_it_says_otherwise(tmp_path):
    text = "[cpu-small.ramp]\nfailures = 1\nthroughput_share = 0.5\n[cpu.ramp]\nthroughput_share = 0.6\n[gpu.ramp]\nfailures = 0\n"
    assert loaded(tmp_path, text) == {"ramp": {"failures": 1, "throughput_share": 0.5}}
    assert loaded(tmp_path, text, "cpu") == {"ramp": {"failures": 1, "throughput_share": 0.6}}
    assert loaded(tmp_path, text, "gpu") == {"ramp": {"failures": 0, "throughput_share": 0.6}}


def loaded(tmp_path, text, profile="cpu-small", shapes=("ramp",)):
    path = tmp_path / "targets.toml"
    path.write_text(text)
    return load_targets(path, profile, shapes)


def test_it_works(tmp_path):
    text = "[cpu-small.ramp]\nfailures = 0\nthroughput_share = 0.5\n[gpu.ramp]\nfailures = 0\n"
    assert loaded(tmp_path, text) == {"ramp": {"failures": 0, "throughput_share": 0.5}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tpu.ramp]\nfailures = 0\n", "unknown profile tpu"),
        ("[gpu.ramp]\nfailures = 0\n", "no targets for cpu-small.ramp"),
        ("[cpu-small.spiral]\nfailures = 0\n", "unknown shape cpu-small.spiral"),
        ("[cpu-small.ramp]\nfailure = 0\n", "cpu-small.ramp.failure is not a figure"),
        ("[cpu-small.ramp]\nrecovery_s = 5\n", "cpu-small.ramp.recovery_s is not a figure of this shape"),
        ("[cpu-small.ramp]\nthroughput_share = 2.1\n", "throughput_share must be a number from 0 to 2"),
        ("[cpu-small.ramp]\nttft_p95_multiple = 0\n", "ttft_p95_multiple must be a number from 0.01 to 1000"),
        ("[cpu-small.ramp]\nfailures = -1\n", "failures must be a number from 0"),
        ("[cpu-small.ramp]\nfailures = true\n", "failures must be a number"),
        ("[cpu-small.ramp]\nfailures = 'none'\n", "failures must be a number"),
        ("[cpu-small.ramp]\nthroughput_share = nan\n", "throughput_share must be a number"),
        ("[cpu-small]\nramp = 3\n", "cpu-small.ramp must be a table"),
        ("cpu-small = 3\n", "cpu-small must be a table"),
        ("[cpu-small.ramp]\n", "no targets for cpu-small.ramp"),
        ("[cpu-small.steps]\nfailures = 0\n", "no targets for cpu-small.ramp"),
        ("[cpu-small.ramp\n", "targets.toml"),
        ("[cpu-small.ramp]\nfailures = 0\n[gpu.ramp]\nspeed = 1\n", "gpu.ramp.speed is not a figure"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, text, told):
    with pytest.raises(TargetsError) as refused:
        loaded(tmp_path, text)
    assert told in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TargetsError):
        load_targets(tmp_path / "none.toml", "cpu-small", ["ramp"])


def test_bounds_have_a_direction():
    targets = {"throughput_share": 0.5, "failures": 0, "gap_p95_multiple": 3}
    met = judged(targets, {"throughput_share": 0.5, "failures": 0.0, "gap_p95_multiple": 3.0})
    assert [verdict.met for verdict in met] == [True, True, True]
    missed = judged(targets, {"throughput_share": 0.49, "failures": 1.0, "gap_p95_multiple": 3.1})
    assert [verdict.met for verdict in missed] == [False, False, False]
    assert missed[0].text() == "MISSED throughput_share: 0.49, at least 0.5"


def test_what_was_not_measured_is_missed():
    (verdict,) = judged({"recovery_s": 600}, {"recovery_s": None})
    assert not verdict.met
    assert verdict.text() == "MISSED recovery_s: not measured, at most 600"
    assert not judged({"recovery_s": 600}, {})[0].met


def test_a_record_is_met_only_if_all_targets_are():
    assert ramp({"failures": 0}).met
    record = ramp({"failures": 0, "throughput_share": 2})
    assert not record.met
    assert "MISSED throughput_share" in record.text()
