"""Peers: pinned environments, how servers are started, and a tokenizer that every server can read."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from benchmarks.environments import CommandError, Environment, cache_folder, run
from benchmarks.models import SPECIALS, fill, is_plain
from benchmarks.peers import OURS, PEERS
from benchmarks.peers.base import Launch, Setup
from benchmarks.peers.vllm import cpu_list
from benchmarks.servers import OwnServer, StartError, running_server
from benchmarks.shapes import RATES
from loadtests.server import free_port
from tests.models.random_models import REAL


def test_an_environment_is_complete_with_its_exact_versions():
    pytest_version = importlib.metadata.version("pytest")
    there = Environment(Path(sys.prefix), {"pytest[dev]": pytest_version})
    assert there.complete()
    assert there.versions("no-such-package") == {"pytest": pytest_version}
    assert not Environment(Path(sys.prefix), {"pytest": "0.1"}).complete()
    assert not Environment(Path("/nowhere"), {"pytest": pytest_version}).complete()


def test_torchs_label_of_its_build_is_no_other_version():
    version = importlib.metadata.version("torch").partition("+")[0]
    assert Environment(Path(sys.prefix), {"torch": version}).complete()


def test_a_command_that_fails_says_what_it_said(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(CommandError, match="out of luck"):
        run([sys.executable, "-c", "raise SystemExit('out of luck')"], log)
    with pytest.raises(CommandError):
        run([str(tmp_path / "nothing")], log)
    run([sys.executable, "-c", "import os; print(os.environ['FAKE'])"], log, {"FAKE": "heard"})
    assert log.read_text().endswith("heard\n")


def test_the_cache_is_outside_of_the_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dragoman" / "peers"


@pytest.mark.parametrize("name", ["dragoman", "vllm", "transformers"])
def test_servers_are_told_model_port_type_and_threads(name, tmp_path):
    peer = {OURS.name: OURS, **PEERS}[name]
    setup = Setup(tmp_path, tmp_path, tmp_path / "shape", "bfloat16", 1, 4321)
    launch = peer.launch(setup, tmp_path / "log")
    said = " ".join([*launch.command, *(f"{key}={value}" for key, value in launch.environment.items())])
    assert all(part in said for part in (str(tmp_path / "shape"), "4321", "bfloat16"))
    assert launch.plain == (name == "transformers")
    assert launch.model == (str(setup.model) if name == "transformers" else "shape")


def test_peers_that_quantize_nothing_are_left_out(tmp_path):
    setup = Setup(tmp_path, tmp_path, tmp_path / "shape", "bfloat16", 1, 4321, "int8")
    assert OURS.launch(setup, tmp_path / "log").environment["DRAGOMAN_QUANTIZATION"] == "int8"
    for name in ("vllm", "transformers"):
        with pytest.raises(CommandError, match="int8"):
            PEERS[name].launch(setup, tmp_path / "log")


def test_cpus_are_named_as_vllm_wants_them():
    assert cpu_list([0, 1, 2]) == "0-2"
    assert cpu_list([0, 2]) == "0,2"


def test_a_command_that_is_not_there_does_not_start(tmp_path):
    server = OwnServer("gone", Launch([str(tmp_path / "nothing")]), free_port(), tmp_path / "log", 1)
    with pytest.raises(StartError):
        server.ensure()


def test_a_server_that_ends_does_not_start(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no memory')"]
    with pytest.raises(StartError, match="no memory"):
        OwnServer("ends", Launch(command), free_port(), tmp_path / "log", 60).ensure()


@pytest.mark.parametrize("argument", ["http://127.0.0.1:1", "name=http://127.0.0.1#model"])
def test_a_running_server_needs_a_name_and_a_port(argument):
    with pytest.raises(ValueError, match="is not name="):
        running_server(argument)


def test_a_tokenizer_is_filled_up_to_the_models_vocabulary():
    tokenizer = {"model": {"vocab": {"a": 0, "\u0120b": 1, "\u0100": 2}}}
    vocabulary = fill(tokenizer, 10)
    assert sorted(vocabulary.values()) == list(range(10))
    assert [token for token, number in vocabulary.items() if number >= 6] == list(SPECIALS)
    assert [entry["id"] for entry in tokenizer["added_tokens"]] == [6, 7, 8, 9]
    assert [token for token in vocabulary if not is_plain(token)] == ["\u0100", *SPECIALS]


def test_every_shape_can_be_made():
    assert set(RATES) - {"demo"} <= set(REAL)


def test_a_recorded_command_names_no_folder_of_the_machine(tmp_path):
    launch = Launch(["/opt/bin/serve", "--model", "/srv/models/m", "http://127.0.0.1:1/v1"], {"CACHE": "/var/c/d"})
    server = OwnServer("some", launch, 1, tmp_path / "log", 1)
    assert server.command == "CACHE=.../d .../serve --model .../m http://127.0.0.1:1/v1"
