"""Stored runs are compared commit by commit, and reports need nothing but themselves."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest
from msgspec.structs import replace

from loadtests.history import is_worse, read, tables
from loadtests.html import write_report
from loadtests.records import read_record
from tests.conftest import ROOT
from tests.loadtests.runs import ramp


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two commits, the second slower; the first was measured twice."""
    folder = tmp_path_factory.mktemp("runs")
    first, again, slower = ramp(), ramp(slow=1.1), ramp({"throughput_share": 0.09}, slow=2)
    replace(first, commit="aaa", date="2026-01-01T00:00:00").write(folder / "a" / "ramp.json")
    replace(again, commit="aaa", date="2026-01-02T00:00:00").write(folder / "b" / "ramp.json")
    replace(slower, commit="bbb", date="2026-01-03T00:00:00").write(folder / "c" / "ramp.json")
    return folder


def test_a_row_for_each_commit(stored):
    (table,) = tables(read([stored]))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    head, _, first, second = rows
    share = head.index("throughput_share")
    assert (first[0], first[2], second[0], second[2]) == ("aaa", "2", "bbb", "1")
    assert "▼" in second[share]
    assert "▼" not in first[share]
    assert (first[-1], second[-1]) == ("none", "throughput_share")


def test_other_machines_and_sizes_stand_in_other_tables(stored):
    line = read([stored])[0]
    elsewhere = replace(line, machine=replace(line.machine, cores=line.machine.cores + 1))
    larger = replace(line, sizes=replace(line.sizes, stage_s=99))
    assert len(tables([line, elsewhere, larger, line])) == 3


def test_worse_has_a_direction():
    assert is_worse("throughput_share", 0.8, 1.0)
    assert not is_worse("throughput_share", 1.2, 1.0)
    assert is_worse("recovery_s", 1.2, 1.0)
    assert not is_worse("recovery_s", 1.05, 1.0)


def test_the_command_prints_tables_and_refuses_other_files(stored, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "loadtests.history"]
    done = subprocess.run([*command, str(stored)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| aaa |" in done.stdout
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path in (other, tmp_path / "none"):
        done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"{path} is not a run" in done.stderr


def test_a_record_has_everything_and_comes_back(stored):
    path = stored / "a" / "ramp.json"
    record = read_record(path)
    raw = msgspec.json.decode(path.read_bytes())
    assert msgspec.json.decode(msgspec.json.encode(record)) == raw
    assert set(raw) >= {"samples", "figures", "verdicts", "stages", "commit", "machine", "sizes", "plan", "curve"}


def test_a_report_is_one_page_with_a_curve(tmp_path):
    missed = ramp({"throughput_share": 2})
    write_report([ramp(), replace(missed, failures={"<b>bad</b>": 3})], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "tokens/s of a user" in page
    assert "tokens/s of the system" in page
    assert 'class="missed"' in page
    assert "&lt;b&gt;bad&lt;/b&gt;" in page
    assert not re.search(r"<script|<link|@import|(?:src|href)=\"(?!#)", page), "nothing is loaded"
