"""Samples travel from workers to a master and keep their times."""

from __future__ import annotations

import json

import pytest

from loadtests.samples import Collection, Outcome, of_window
from tests.loadtests.runs import sample, window


def test_samples_of_workers_are_merged_in_the_masters_clock(monkeypatch):
    """Each worker's clock is off by another amount."""
    clocks = {"one": 5000.0, "two": -3000.0}
    master = Collection()
    for name, offset in clocks.items():
        worker = Collection()
        sent = sample(1.0, tokens=len(name), user=name, outcome=Outcome.REFUSED, told_when=True)
        sent.at_s += offset
        worker.add(sent)
        monkeypatch.setattr("time.time", lambda at=sent.at_s: at + 2)
        report: dict = {"stats": 1}
        worker.give(report)
        assert worker.samples == [], "a report is sent once"
        monkeypatch.setattr("time.time", lambda: 200.0)
        master.take(json.loads(json.dumps(report)), name)
    assert [(s.user, s.worker, s.at_s) for s in master.samples] == [
        ("one", "one", pytest.approx(198)),
        ("two", "two", pytest.approx(198)),
    ]
    assert all(s.outcome is Outcome.REFUSED and s.told_when for s in master.samples)


def test_a_report_without_samples_is_none():
    master = Collection()
    master.take({"stats": 1})
    assert master.samples == []


def test_samples_belong_to_the_window_in_which_they_were_sent():
    samples = [sample(at) for at in (0.0, 1.0, 1.5, 2.0, 3.0)]
    assert of_window(samples, window("x", 1, 2)) == samples[1:4]
