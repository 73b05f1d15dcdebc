"""The campaign for a device: every part runs without one, a call continues the last, and a bad device is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tools.gpu import campaign, counters, device
from tools.gpu.campaign import GIB, PARTS, Part
from tools.gpu.results import Figure, Results, table

H100 = device.Device("H100", (9, 0), 80 * GIB, 79 * GIB, "2.11.0", "13.0", "3.6.0", "5.23.0")
T4 = device.Device("T4", (7, 5), 16 * GIB, 15 * GIB, "2.11.0", "13.0", "3.6.0", "5.23.0")


class Ran(list[str]):
    """Names of parts, and how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, list[int | None]] = {}


def called(monkeypatch, *options: str) -> int:
    """The campaign's exit status."""
    monkeypatch.setattr(sys, "argv", ["campaign", *options])
    return campaign.main()


@pytest.fixture
def two_parts(monkeypatch):
    """A campaign of two parts; a list of those that ran. One ends with the status that `ends` has, or well."""
    ran = Ran()

    def run_part(part, results, folder, dry, limit_s):
        ran.append(part.name)
        results.add(part.name, f"{len(ran)}", [Figure(row="a", unit="ms", value=1.5)])
        statuses = ran.ends.get(part.name, [])
        return statuses.pop(0) if statuses else 0, 1.0

    monkeypatch.setattr(campaign, "PARTS", (Part("first", "suite"), Part("second", "suite", needs_gib=40)))
    monkeypatch.setattr(campaign, "run_part", run_part)
    return ran


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_dry_run_executes_every_part(tmp_path):
    command = ["make", "--no-print-directory", "gpu-campaign", "DRY=1", f"RESULTS={tmp_path / 'dry.jsonl'}"]
    variables = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = Results(tmp_path / "dry.jsonl", device.DRY, "")
    assert {e.part for e in results.entries() if e.figure is not None} == results.finished() == {p.name for p in PARTS}
    again = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert again.stdout.count("done before") == len(PARTS)
    assert again.stdout.endswith(done.stdout[done.stdout.index("| part |") :])


@pytest.mark.smoke
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.campaign", "--results", str(tmp_path / "none.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "tools.gpu.campaign: torch finds no CUDA device here\n")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_device_that_is_too_old_is_refused():
    device.check(H100)
    with pytest.raises(device.Unusable, match=r"T4 has compute capability 7\.5; 8\.0 is the least"):
        device.check(T4)


def test_a_part_that_does_not_fit_is_left_for_the_next_call(tmp_path, monkeypatch, capsys, two_parts):
    full = device.Device("H100", (9, 0), 80 * GIB, 10 * GIB, "2.11.0", "13.0", "3.6.0", "5.23.0")
    monkeypatch.setattr(campaign, "look", lambda: full)
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 1
    assert "second: needs 40 GiB of device memory, 10.0 are free" in capsys.readouterr().err
    monkeypatch.setattr(campaign, "look", lambda: H100)
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 0
    assert two_parts == ["first", "second"]


def test_a_device_that_goes_away_loses_nothing(tmp_path, monkeypatch, capsys, two_parts):
    answers = [H100, device.Unusable("torch finds no CUDA device here")]
    two_parts.ends["first"] = [1]

    def look():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(campaign, "look", look)
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 3
    told = capsys.readouterr()
    assert "stopped: torch finds no CUDA device here" in told.err
    assert "| first | a | ms | 1.5 |" in told.out
    assert two_parts == ["first"]


def test_a_part_that_was_cut_off_is_begun_again_while_there_is_time(tmp_path, monkeypatch, two_parts):
    monkeypatch.setattr(campaign, "look", lambda: H100)
    two_parts.ends["first"] = [None, 0]
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 0
    assert two_parts == ["first", "second", "first"]


def test_a_part_that_fails_is_left_for_the_next_call(tmp_path, monkeypatch, capsys, two_parts):
    monkeypatch.setattr(campaign, "look", lambda: H100)
    two_parts.ends["first"] = [1]
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 1
    assert "first: with failures" in capsys.readouterr().err
    assert called(monkeypatch, "--results", str(tmp_path / "f")) == 0
    assert two_parts == ["first", "second", "first"]


@pytest.mark.parametrize(("name", "base"), [
    ("_attention", "_attention"),
    ("void at::native::(anonymous namespace)::softmax<float, 4>(float*, int)", "softmax"),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, bf16<2>>(p)", "kernel"),
    ("void cutlass::Kernel2<cutlass_80_gemm<a>>(Params)", "Kernel2"),
])  # fmt: skip
def test_names_of_kernels_are_those_of_the_profiler(name, base):
    assert counters.base_name(name) == base


def test_parts_without_time_are_told(tmp_path, monkeypatch, capsys, two_parts):
    monkeypatch.setattr(campaign, "look", lambda: H100)
    assert called(monkeypatch, "--results", str(tmp_path / "f"), "--budget-s", "1") == 1
    assert "first: no time left\n  second: no time left" in capsys.readouterr().err


def test_a_part_ends_at_its_limit_with_all_its_processes(tmp_path):
    results = Results(tmp_path / "f", device.DRY, "")
    status, seconds = campaign.run_part(Part("tests", "suite"), results, tmp_path, dry=True, limit_s=0.2)
    assert status is None
    assert results.finished() == set()
    assert seconds < 60


def test_a_line_that_was_cut_off_is_left_out_and_the_next_begins_anew(tmp_path):
    results = Results(tmp_path / "f", "H100", "abc")
    results.add("steps", "a", [Figure(row="a", unit="ms", value=1)])
    with results.path.open("ab") as file:
        file.write(b'{"part":"steps","ce')
    results.add("steps", "b", [Figure(row="b", unit="ms", value=2)])
    assert results.done("steps") == {"a", "b"}


def test_a_cell_that_failed_is_missing_until_it_has_figures(tmp_path):
    results = Results(tmp_path / "f", "H100", "abc")
    results.add("steps", "a", [], "RuntimeError: out of memory")
    assert results.done("steps") == set()
    assert [entry.error for entry in results.failures()] == ["RuntimeError: out of memory"]
    results.add("steps", "a", [Figure(row="a", unit="ms", value=1)])
    assert results.done("steps") == {"a"}
    assert results.failures() == []


def test_figures_of_another_device_are_its_own(tmp_path):
    Results(tmp_path / "f", "H100", "abc").add("steps", "a", [Figure(row="a", unit="ms", value=1)])
    assert Results(tmp_path / "f", "H200", "abc").done("steps") == set()


def test_the_table_adds_up_counts_and_shows_shares(tmp_path):
    results = Results(tmp_path / "f", "H100", "abc")
    for name in ("x", "y"):
        results.add("tests", name, [Figure(row="test_engine.py", unit="passed", value=1)])
    results.add("steps", "a", [Figure(row="7B", unit="ms a step", value=5.94321, column=1, share=0.8)])
    results.add("steps", "b", [Figure(row="7B", unit="ms a step", value=1234.5, column=32)])
    assert table(results.entries()).splitlines()[2:] == [
        "| tests | test_engine.py | passed | 2 |  |  |",
        "| steps | 7B | ms a step |  | 5.94 (0.80) | 1234 |",
    ]
