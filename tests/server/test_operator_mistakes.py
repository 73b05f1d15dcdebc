"""What an operator reads when a command cannot begin: one line that names the setting or the file, an exit status, no traceback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from config.installation import DATABASE
from tests.conftest import ROOT
from tests.live import free_port

NOBODY = 65534
PATIENCE_S = 120
COMMANDS = [
    ["serve"], ["web"], ["reconcile"], ["migrate"], ["createkey", "x"], ["status", "--once"], ["deploy", "demo"],
]  # fmt: skip
PORTS = ("FRONT_PORT", "CONTROL_PORT", "GRPC_PORT", "DJL_PORT", "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT",
         "MINDIE_METRICS_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT")  # fmt: skip


def run(arguments, data_dir, *, prefix=(), **settings):
    """A command that ends by itself. What it wrote to both streams is in `stdout`."""
    given = {f"DRAGOMAN_{name}": str(value) for name, value in {"DATA_DIR": data_dir, **settings}.items()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    return subprocess.run(
        [*prefix, sys.executable, "-W", "ignore", "manage.py", *arguments],
        cwd=ROOT,
        env={**kept, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def refused(done, *told):
    assert "Traceback" not in done.stdout
    assert all(text in done.stdout for text in told), done.stdout
    return done.returncode


@pytest.fixture
def stranger():
    """Words before a command that runs it as another user than the one of these tests."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to be another user")
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if subprocess.run([*words, sys.executable, "-c", "import django"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("other users cannot run this interpreter")
    return words


@pytest.fixture
def shared_folder():
    """A data folder that other users can reach, which pytest's own cannot be."""
    with tempfile.TemporaryDirectory(prefix="dragoman-operator-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_a_data_folder_that_is_a_file(arguments, tmp_path):
    (tmp_path / "var").write_text("")
    assert (
        refused(run(arguments, tmp_path / "var"), f"error: DRAGOMAN_DATA_DIR: {tmp_path / 'var'} cannot be used") == 2
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_a_setting_out_of_range(arguments, tmp_path):
    done = run(arguments, tmp_path / "var", FRONT_PORT="70000")
    assert refused(done, "error: DRAGOMAN_FRONT_PORT: ", "65535") == 2
    assert not (tmp_path / "var").exists()


@pytest.mark.parametrize("command", ["serve", "web", "reconcile"])
def test_a_misspelt_setting_is_told(command, tmp_path):
    unknown = {"MAX_MODEL_LENGTH": "100", "COLOUR_OF_LOGS": "red"}
    done = run([command], tmp_path / "var", DATABASE_URL="mysql://x", **unknown)  # which ends it
    told = (
        "warning: DRAGOMAN_MAX_MODEL_LENGTH: unknown setting; did you mean DRAGOMAN_MAX_MODEL_LEN?",
        "warning: DRAGOMAN_COLOUR_OF_LOGS: unknown setting",
    )
    assert refused(done, *told)


@pytest.mark.parametrize(("arguments", "status"), [(["serve"], 2), (["createkey", "x"], 2), (["doctor"], 2)])
def test_a_list_that_is_no_json(arguments, status, tmp_path):
    done = run(arguments, tmp_path / "var", API_KEYS="sk-correct-horse")
    assert refused(done, "DRAGOMAN_API_KEYS: a JSON list is expected") == status
    assert "correct-horse" not in done.stdout


@pytest.mark.parametrize("arguments", [["migrate"], ["status", "--once"]], ids=lambda words: words[0])
def test_a_database_is_its_owners_alone_whichever_command_makes_it(arguments, tmp_path):
    (tmp_path / "data").mkdir(mode=0o755)
    run(arguments, tmp_path / "data")
    assert {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "data").iterdir() if path.is_file()} == {
        DATABASE: 0, "secret-key": 0,
    }  # fmt: skip


@pytest.mark.parametrize("command", ["serve", "web"])
def test_a_dialects_settings(command, tmp_path):
    done = run([command], tmp_path / "data", TORCHSERVE_MAX_TOKENS="0", TORCHSERVE_ALLOWED_URLS="correct-horse")
    told = (
        "DRAGOMAN_TORCHSERVE_MAX_TOKENS: ",
        "greater than or equal to 1",
        "DRAGOMAN_TORCHSERVE_ALLOWED_URLS: a JSON list",
    )
    assert refused(done, *told) == 1
    assert "pydantic" not in done.stdout
    assert "correct-horse" not in done.stdout


@pytest.mark.parametrize("url", ["nonsense", "mysql://user:s3cret@host/x", "postgresql://user:s3cret@host:port/x"])
def test_an_address_of_no_database(url, tmp_path):
    for arguments in (["web"], ["status", "--once"]):
        done = run(arguments, tmp_path / "var", DATABASE_URL=url)
        assert refused(done, "DRAGOMAN_DATABASE_URL: an address is postgresql://") == 2
        assert "s3cret" not in done.stdout
    done = run(["doctor"], tmp_path / "var", DATABASE_URL=url)
    assert refused(done, "DRAGOMAN_DATABASE_URL: an address is postgresql://") == 2
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_a_database_that_does_not_answer(arguments, tmp_path):
    url = f"postgresql://user:s3cret@127.0.0.1:{free_port()}/name"
    done = run(arguments, tmp_path / "var", DATABASE_URL=url)
    assert refused(done, "the registry cannot be ", "Connection refused") == (2 if arguments[0] == "status" else 1)
    assert "s3cret" not in done.stdout
    assert "migrate" not in done.stdout.split("Connection refused")[1], "which would not help"


@pytest.mark.parametrize(
    "name",
    ["DATA_DIR", "DATABASE_URL_FILE", "SESSION_KEY_FILE", "TLS_CERTIFICATE", "TLS_KEY_PASSWORD_FILE", "CLUSTER_KEY",
     "MINDIE_CONFIG", "TORCHSERVE_KEY_FOLDER"],
)  # fmt: skip
def test_an_address_in_place_of_a_path_is_not_shown(name, tmp_path):
    done = run(["doctor"], tmp_path / "var", **{name: "postgresql://user:s3cret@host/name"})
    assert refused(done, f"DRAGOMAN_{name}: a path is expected, not an address") == 2
    assert "s3cret" not in done.stdout


def test_an_address_among_paths_is_not_shown(tmp_path):
    done = run(["serve"], tmp_path / "var", ADAPTER_ROOTS='["/tmp", "https://user:s3cret@host/"]')
    assert refused(done, "DRAGOMAN_ADAPTER_ROOTS: a path is expected, not an address") == 2
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODEL", "https://user:s3cret@host/x"), ("PUBLIC_URL", "ftp://user:s3cret@host"), ("LAUNCHER", "s3cret"),
     ("OTLP_TRACES_ENDPOINT", "grpc://user:s3cret@host"), ("ALLOWED_ORIGINS", '["https://user:s3cret@host/x"]')],
)  # fmt: skip
def test_no_value_is_shown(name, value, tmp_path):
    done = run(["serve"], tmp_path / "var", **{name: value})
    assert refused(done, f"error: DRAGOMAN_{name}: ") == 2
    assert "s3cret" not in done.stdout


def test_an_address_to_deploy_is_not_shown(tmp_path):
    assert run(["migrate", "--verbosity", "0"], tmp_path / "var").returncode == 0
    done = run(["deploy", "https://user:s3cret@host/x"], tmp_path / "var")
    assert refused(done, "a directory or a hub id is expected, not an address") == 1
    assert "s3cret" not in done.stdout


def test_a_mindie_config_that_cannot_be_read(tmp_path):
    for name in ("DRAGOMAN_MINDIE_CONFIG", "MIES_CONFIG_JSON_PATH"):
        done = run(["web"], tmp_path / "var", prefix=["env", f"{name}={tmp_path / 'none.json'}"])
        assert refused(done, f"{name}: {tmp_path / 'none.json'}: No such file or directory") == 1


def test_tables_that_are_missing(tmp_path):
    for arguments in (["web"], ["createkey", "x"]):
        assert refused(run(arguments, tmp_path / "var"), "run `migrate` first", DATABASE) == 1
    for arguments, status in ((["status", "--once"], 2), (["scale", "demo", "1"], 1), (["flight"], 1)):
        assert refused(run(arguments, tmp_path / "var"), "the registry cannot be ", "run `migrate` first") == status
    assert refused(run(["health", "reconcile"], tmp_path / "var"), "the registry cannot be read") == 1


def test_a_data_folder_of_another_user(stranger, shared_folder):
    whose = f"it is of user 0, and this process runs as {NOBODY}"
    for arguments in (["serve"], ["web"], ["createkey", "x"]):
        assert (
            refused(run(arguments, shared_folder, prefix=stranger), str(shared_folder), "Permission denied", whose) == 2
        )
    assert refused(run(["health", "reconcile"], shared_folder, prefix=stranger), whose) == 1


@pytest.mark.parametrize(("mode", "told"), [(0o600, "unable to open database file"), (0o644, "readonly")])
def test_a_database_that_another_user_has_made(mode, told, stranger, shared_folder):
    """As after a command of root's in the folder of a service, by this version and by one that let others read."""
    assert run(["migrate", "--verbosity", "0"], shared_folder).returncode == 0
    os.chown(shared_folder, NOBODY, NOBODY)
    os.chown(shared_folder / "secret-key", NOBODY, NOBODY)
    database = shared_folder / DATABASE
    database.chmod(mode)
    whose = f"it is of user 0, and this process runs as {NOBODY}"
    for arguments in (["serve"], ["reconcile"], ["createkey", "x"]):
        assert refused(run(arguments, shared_folder, prefix=stranger), str(database), told, whose) == 1
    done = run(["doctor"], shared_folder, prefix=stranger)
    assert refused(done, f"{database} cannot be read and written", whose, f"chown {NOBODY} {database}") == 2


@pytest.mark.parametrize(
    ("command", "name"),
    [("serve", "FRONT_PORT"), ("serve", "GRPC_PORT"), ("web", "MINDIE_METRICS_PORT"), ("web", "GRPC_PORT")],
)
def test_a_port_in_use_is_named_with_its_setting(command, name, tmp_path):
    assert run(["migrate", "--verbosity", "0"], tmp_path / "var").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {each: free_port() for each in PORTS} | {name: other.getsockname()[1]}
        done = run([command], tmp_path / "var", **ports)
        told = f"DRAGOMAN_{name}: port {ports[name]} of 127.0.0.1 cannot be bound: Address already in use"
        assert refused(done, told) == 1


def test_a_host_that_cannot_be_resolved(tmp_path):
    ports = {each: free_port() for each in PORTS}
    done = run(["serve"], tmp_path / "var", HOST="no.such.host.invalid", ALLOW_PLAIN_TEXT="true", **ports)
    assert refused(done, "DRAGOMAN_HOST: port", "of no.such.host.invalid cannot be bound") == 1


def test_a_folder_of_sockets_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert refused(run(["reconcile"], tmp_path / "var"), "cannot be made", "DRAGOMAN_RUNTIME_DIR") == 1


def test_a_model_whose_folder_does_not_exist(tmp_path):
    assert run(["migrate", "--verbosity", "0"], tmp_path / "var").returncode == 0
    assert (
        refused(run(["deploy", "/nowhere/at/all"], tmp_path / "var"), "/nowhere/at/all: the directory does not exist")
        == 1
    )
