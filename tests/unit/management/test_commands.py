"""The commands for deployments: for people, and with --json for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError

from management.management.commands import deploy
from management.models import Deployment, Worker
from management.services.deployments import create_deployment, start_deployment
from tests.conftest import DEMO

pytestmark = pytest.mark.django_db


def output(capsys, *arguments: str) -> str:
    call_command(*arguments)
    return capsys.readouterr().out


def test_deploy_registers_creates_and_starts(capsys):
    shown = output(capsys, "deploy", str(DEMO), "--name", "one", "--max-workers", "3", "--option", "max_num_seqs=8",
                   "--option", "prefix_caching=false", "--json")  # fmt: skip
    row = Deployment.objects.get(name="one")
    assert json.loads(shown) == {
        "id": row.public_id, "name": "one", "state": "provisioning", "reason": "", "workers_wanted": 0,
    }  # fmt: skip
    assert (row.replicas, row.max_workers) == (1, 3)
    assert row.engine_options == {"max_num_seqs": 8, "prefix_caching": False}
    assert row.version.source == str(DEMO.resolve())
    output(capsys, "deploy", row.version.model.name, "--name", "two")
    assert Deployment.objects.get(name="two").version == row.version


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--option", "max_num_seqs=lots"], "max_num_seqs must be of the type int"),
        (["--option", "max_num_seqs"], "NAME=VALUE is expected"),
        (["--option", "colour=red"], "colour is no engine option$"),
        (["--option", "max_seqs=4"], "max_seqs is no engine option; did you mean max_num_seqs\\?"),
        (["--min-workers", "3", "--max-workers", "2"], "max_workers: must be at least min_workers"),
        (["--scale-to-zero", "--min-workers", "1"], "scale_to_zero: conflicts with min_workers"),
        (["--upper-threshold", "1", "--lower-threshold", "1"], "lower_threshold: must be below upper_threshold"),
        (["--max-price-per-hour", "-1"], "max_price_per_hour"),
        (["--up-window-s", "0"], "up_window_s"),
        (["--option", "max_model_len=100000000"], "max_model_len"),
        (["--embedding", "--strategy", "ttft_latency_sec"], "strategy: must be one of rps_per_worker"),
        (["--adapter", "a=/nowhere"], "source"),
    ],
)
def test_deploy_refuses_and_leaves_nothing(arguments, text):
    with pytest.raises(CommandError, match=text):
        call_command("deploy", str(DEMO), *arguments)
    assert not Deployment.objects.exists()


@pytest.mark.parametrize(
    ("failures", "text"), [(1, "A deployment with this name exists"), (9, "other calls took the names")]
)
def test_a_name_that_another_call_takes_after_the_check(monkeypatch, failures, text):
    """The transaction is tried again, and then finds what the other call wrote."""
    calls = []

    def taken(name, version, *args, **fields):
        calls.append(name)
        if len(calls) <= failures:
            raise IntegrityError("duplicate key value violates unique constraint")
        create_deployment(name, version, "another call")
        return create_deployment(name, version, *args, **fields)

    monkeypatch.setattr(deploy, "create_deployment", taken)
    with pytest.raises(CommandError, match=text):
        call_command("deploy", str(DEMO))


def test_change_scale_stop_and_delete(capsys, deployment):
    start_deployment(deployment, "tester")
    output(capsys, "change", "demo", "--max-workers", "4", "--option", "max_num_seqs=2")
    deployment.refresh_from_db()
    assert (deployment.max_workers, deployment.engine_options) == (4, {"max_num_seqs": 2})
    output(
        capsys, "change", "demo", "--spot", "--gpu-type", "L4", "--gpus-per-worker", "2", "--on-prem-node-ids", "a", "b"
    )
    deployment.refresh_from_db()
    assert (deployment.spot, deployment.gpu_type, deployment.gpus_per_worker) == (True, "L4", 2)
    assert deployment.on_prem_node_ids == ["a", "b"]
    output(capsys, "change", "demo", "--no-spot", "--gpu-type", "", "--gpus-per-worker", "0", "--on-prem-node-ids")
    deployment.refresh_from_db()
    assert (deployment.spot, deployment.gpu_type, deployment.on_prem_node_ids) == (False, "", [])
    output(capsys, "scale", "demo", "3")
    deployment.refresh_from_db()
    assert deployment.replicas == 3
    assert "inactive" in output(capsys, "scale", "demo", "zero")
    output(capsys, "scale", deployment.public_id, "up")
    deployment.refresh_from_db()
    assert deployment.replicas == 1
    output(capsys, "stop", "demo", "--force")
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.force) == (0, True)
    assert "deleting" in output(capsys, "delete", "demo")
    for command in (["stop", "demo"], ["scale", "demo", "1"], ["delete", "demo"], ["change", "demo"]):
        with pytest.raises(CommandError, match="there is no deployment 'demo'"):
            call_command(*command)


def test_status_shows_workers_and_what_they_do(capsys, deployment):
    start_deployment(deployment, "tester")
    Worker.objects.create(deployment=deployment, version=deployment.version, index=0, epoch=1, state="loading",
                          reason="compiling attend", address="x", process_id=17)  # fmt: skip
    found = json.loads(output(capsys, "status", "--json"))
    (row,) = found["deployments"]
    assert (row["name"], row["state"]) == ("demo", "provisioning")
    assert [(w["worker"], w["state"], w["doing"]) for w in row["workers"]] == [
        ("demo/0", "loading", "compiling attend")
    ]
    shown = output(capsys, "status", "--once")
    assert "demo/0" in shown
    assert "compiling attend" in shown
    assert "No process leads: states are as they were last recorded." in shown
    assert row["workers"][0]["role"] == "both"
    output(capsys, "change", "demo", "--max-workers", "2", "--prefill-workers", "1")
    (row,) = json.loads(output(capsys, "status", "--json"))["deployments"]
    assert row["workers"][0]["role"] == "prefill"
    assert "prefill" in output(capsys, "status", "--once")


def test_status_fits_eighty_columns(capsys, deployment):
    long = "qwen2.5-coder-14b-instruct-of-the-documentation-team"
    Deployment.objects.update(name=long, state="failed", observed_generation=1, reason="there is no config.json " * 9)
    Worker.objects.create(deployment=deployment, version=deployment.version, index=0, epoch=123, state="loading",
                          reason="compiling attend", address="x", process_id=1234567)  # fmt: skip
    lines = output(capsys, "status", "--once").splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line.split() for line in lines if "failed" in line)
    assert row[-4:] == ["0", "0", "0", "0"]
    assert "there is no config.json" in " ".join(" ".join(lines).split())


def test_flight_signals_no_process_that_is_no_worker(deployment):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Worker.objects.create(
            deployment=deployment, version=deployment.version, index=0, epoch=1, state=Worker.State.READY,
            node=os.uname().nodename, process_id=stranger.pid,
        )  # fmt: skip
        with pytest.raises(CommandError, match="no worker runs on this machine"):
            call_command("flight")
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")
