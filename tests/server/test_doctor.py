"""`doctor` finds what is wrong with a set-up, one small check for each, and changes nothing."""

from __future__ import annotations

import datetime
import json
import os
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections import namedtuple

import pytest
import trustme

from config.cluster_certificates import make
from config.doctor import machine, network, settings
from config.doctor.finding import Level
from config.doctor.registry import check_model
from config.doctor.run import checked, examine, shown
from config.installation import DATABASE
from config.options import Options
from inference.server.tls import TlsFiles
from tests.conftest import DEMO, ROOT
from tests.live import free_port
from tests.postgresql import Cluster

PORTS = ("FRONT_PORT", "CONTROL_PORT", "GRPC_PORT", "DJL_PORT", "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT",
         "MINDIE_METRICS_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT")  # fmt: skip


@pytest.fixture
def environment(tmp_path):
    """Variables of a set-up with which nothing is wrong."""
    ours = {f"DRAGOMAN_{name}": str(free_port()) for name in PORTS}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DRAGOMAN_", "OTEL_"))}
    return {**kept, **ours, "DRAGOMAN_DATA_DIR": str(tmp_path / "var")}


def doctor(environment, *arguments):
    command = [sys.executable, "-W", "ignore", "manage.py", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def findings(environment):
    """The report's findings that are not ok, and the exit status."""
    done = doctor(environment, "--json")
    report = json.loads(done.stdout)
    return [(f["check"], f["level"], f["text"]) for f in report["checks"] if f["level"] != "ok"], done.returncode


def test_a_set_up_with_which_nothing_is_wrong(environment, tmp_path):
    done = doctor(environment, "--json")
    report = json.loads(done.stdout)
    checks = {finding["check"] for finding in report["checks"] if finding["check"] not in ("cpu", "disk", "gpu")}
    assert checks == {"settings", "telemetry", "ports", "files", "redis", "certificates", "database", "models"}
    assert all(f["level"] == "ok" for f in report["checks"] if f["check"] in checks), report
    assert not (tmp_path / "var").exists()


def test_several_errors_are_told_at_once_and_no_value(environment):
    (_, first, _), *others = found = findings(
        {**environment, "DRAGOMAN_FRONT_PORT": "s3cret", "DRAGOMAN_LAUNCHER": "rocket", "DRAGOMAN_HOTS": "x"}
    )[0]
    assert first == "error"
    assert {text.partition(":")[0] for _, level, text in found if level == "error"} == {
        "DRAGOMAN_FRONT_PORT", "DRAGOMAN_LAUNCHER",
    }  # fmt: skip
    assert others[-1] == ("settings", "warning", "DRAGOMAN_HOTS is no setting")
    assert "s3cret" not in repr(found)


def test_the_exit_status_is_2_with_errors_and_1_with_warnings(environment):
    assert findings({**environment, "DRAGOMAN_MODEL": "/nowhere/at/all"})[1] == 2
    assert doctor({**environment, "DRAGOMAN_HOTS": "x"}).returncode == 1


def test_a_dialects_own_file_and_setting(environment, tmp_path):
    (tmp_path / "config.json").write_text("{")
    found, _ = findings(
        {**environment, "DRAGOMAN_MINDIE_CONFIG": str(tmp_path / "config.json"), "DRAGOMAN_DJL_PORT": "-1"}
    )
    named = {text.partition(":")[0] for _, _, text in found if "config.json" in text or "DJL" in text}
    assert named == {"DRAGOMAN_DJL_PORT", "MindIE"}


def test_a_database_that_is_none_and_one_of_another_version(environment, tmp_path):
    folder = tmp_path / "var"
    folder.mkdir()
    (folder / DATABASE).write_bytes(b"no database" * 1000)
    assert [(check, level) for check, level, _ in findings(environment)[0] if check == "database"] == [
        ("database", "error")
    ]
    (folder / DATABASE).unlink()
    sqlite3.connect(folder / DATABASE).close()
    subprocess.run([sys.executable, "manage.py", "migrate"], cwd=ROOT, env=environment, check=True, capture_output=True)
    assert "database" not in {check for check, _, _ in findings(environment)[0]}
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute("DELETE FROM django_migrations WHERE app = 'management' AND name NOT LIKE '0001%'")
    assert "are not applied" in next(text for check, _, text in findings(environment)[0] if check == "database")
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES ('management', '9999_x', '2026-01-01')"
        )
    database.close()
    assert "another version" in next(text for check, _, text in findings(environment)[0] if check == "database")


def test_secrets_of_another_key(environment, tmp_path):
    (tmp_path / "var").mkdir()
    sqlite3.connect(tmp_path / "var" / DATABASE).close()
    program = """if True:
        import django
        django.setup()
        from django.core.management import call_command
        call_command("migrate", verbosity=0)
        from management.services.deployments import create_deployment
        from management.services.models import register_model
        from management.services.secrets import store_secret
        store_secret(create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester"), "hf_token", "x")
    """
    variables = {**environment, "DJANGO_SETTINGS_MODULE": "config.settings"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, check=True, capture_output=True)
    assert "secrets" not in {check for check, _, _ in findings(environment)[0]}
    (tmp_path / "var" / "secrets-key").unlink()
    (found,) = (finding for finding in findings(environment)[0] if finding[0] == "secrets")
    assert found[1:] == ("error", "1 of 1 stored secrets were encrypted with another DRAGOMAN_SECRETS_KEY")
    assert not (tmp_path / "var" / "secrets-key").exists()


def test_a_database_that_cannot_be_reached_is_named_without_its_password(environment):
    url = f"postgresql://user:s3cret@127.0.0.1:{free_port()}/name"
    done = doctor({**environment, "DRAGOMAN_DATABASE_URL": url})
    assert done.returncode == 2
    assert "DRAGOMAN_DATABASE_URL: the database cannot be used: connection failed" in done.stdout
    assert "Connection refused" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_a_database_that_takes_no_changes(environment):
    server = Cluster()
    try:
        read_only = f"{server.url}?options=-c%20default_transaction_read_only=on"
        found, status = findings({**environment, "DRAGOMAN_DATABASE_URL": read_only})
    finally:
        server.remove()
    assert ("database", "error", "DRAGOMAN_DATABASE_URL: the database can be read, but takes no changes") in found
    assert status == 2


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (finding,) = network.check_ports({("127.0.0.1", port): "DRAGOMAN_FRONT_PORT"})
    assert (finding.level, finding.text) == (
        Level.ERROR, f"DRAGOMAN_FRONT_PORT: port {port} of 127.0.0.1 cannot be bound: Address already in use",
    )  # fmt: skip
    assert [f.level for f in network.check_ports({("127.0.0.1", free_port()): "DRAGOMAN_FRONT_PORT"})] == [Level.OK]


def test_a_host_that_cannot_be_resolved_is_one_finding():
    addresses = {("no.such.host.invalid", port): f"DRAGOMAN_{name}" for port, name in enumerate(PORTS, 8000)}
    (finding,) = network.check_ports(addresses)
    assert finding.level == Level.ERROR
    assert finding.text.startswith("DRAGOMAN_HOST: no.such.host.invalid cannot be resolved: ")


def test_a_limit_of_open_files_that_is_lower_than_the_connections(monkeypatch):
    options = Options(max_connections=4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    (finding,) = machine.check_open_files(options)
    assert finding.level == Level.WARNING
    assert finding.text == "a process may open 4,096 files, and DRAGOMAN_MAX_CONNECTIONS=4096 needs 4,352"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    assert [each.level for each in machine.check_open_files(options)] == [Level.OK]


def test_a_port_of_a_server_that_runs_is_a_warning(tmp_path):
    program = tmp_path / "serve"
    program.write_text(
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, str(program), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(other.stdout.readline())
        (finding,) = network.check_ports({("127.0.0.1", port): "DRAGOMAN_FRONT_PORT"})
        assert (finding.level, str(other.pid) in finding.text) == (Level.WARNING, True)
    finally:
        other.communicate("\n")


DAY = datetime.timedelta(days=1)


@pytest.fixture
def tls(tmp_path):
    """Makes TLS files whose certificate is valid for so many days."""

    def make(days):
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        now = datetime.datetime.now(datetime.UTC)
        made = authority.issue_cert("localhost", not_before=now - 400 * DAY, not_after=now + days * DAY)
        paths = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
        made.cert_chain_pems[0].write_to_path(paths[0])
        made.private_key_pem.write_to_path(paths[1])
        authority.cert_pem.write_to_path(paths[2])
        paths[1].chmod(0o600)
        return TlsFiles(paths[0], paths[1], (paths[2],))

    return make


@pytest.mark.parametrize(("days", "level"), [(-1, Level.ERROR), (20, Level.WARNING), (100, Level.OK)])
def test_a_certificates_end(tls, days, level):
    findings = network.check_certificates([tls(days)])
    assert [f.level for f in findings if "cert.pem" in f.text] == [level]


def test_a_key_that_others_may_read(tls):
    files = tls(100)
    files.key.chmod(0o644)
    finding = network.check_certificates([files])[-1]
    assert finding.level >= Level.WARNING
    assert "key.pem" in finding.text


def test_the_certificate_of_the_cluster_is_looked_at_too(environment, tmp_path):
    make(tmp_path / "tls", ["host-a"], days=1)
    files = {"AUTHORITY": "authority.pem", "CERTIFICATE": "host-a.pem", "KEY": "host-a.key"}
    names = {f"DRAGOMAN_CLUSTER_{what}": str(tmp_path / "tls" / file) for what, file in files.items()}
    ends = [(level, text) for check, level, text in findings({**environment, **names})[0] if check == "certificates"]
    assert any(level == "warning" and "host-a.pem" in text for level, text in ends), ends
    names["DRAGOMAN_CLUSTER_REVOCATIONS"] = str(tmp_path / "tls" / "host-a.pem")
    found = [(level, text) for check, level, text in findings({**environment, **names})[0] if check == "certificates"]
    assert any(level == "error" and "no readable revocation list" in text for level, text in found), found


def test_files_that_are_no_certificates(tls):
    files = tls(100)
    files.certificate.write_text("nothing")
    (finding,) = network.check_certificates([files])
    assert (finding.level, "cert.pem" in finding.text) == (Level.ERROR, True)


def test_a_model_without_weights_and_one_that_is_cut_off(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    assert check_model(str(model), Level.ERROR).level == Level.OK
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged or truncated" in check_model(str(model), Level.ERROR).text
    weights.unlink()
    assert check_model(str(model), Level.WARNING).level == Level.WARNING
    (model / "config.json").write_text("{")
    assert "config.json" in check_model(str(model), Level.ERROR).text
    assert check_model("organisation/model", Level.ERROR).level == Level.OK


def test_a_data_folder_that_is_a_file_or_has_open_secrets(tmp_path):
    (tmp_path / "file").touch()
    (finding,) = machine.check_data_folder(Options(data_dir=tmp_path / "file" / "var"))
    assert finding.level == Level.ERROR
    (tmp_path / "secret-key").touch(mode=0o644)
    (tmp_path / "secret-key").chmod(0o644)
    assert machine.check_data_folder(Options(data_dir=tmp_path))[-1].hint == f"chmod 600 {tmp_path / 'secret-key'}"


@pytest.mark.parametrize(("free", "level"), [(50 << 20, Level.ERROR), (500 << 20, Level.WARNING), (5 << 30, Level.OK)])
def test_room_on_the_disk(monkeypatch, tmp_path, free, level):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(free))
    assert machine.check_space(tmp_path).level == level


def test_what_the_cpu_can_do(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    for flags, allowed, expected in (
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16", True, [Level.OK]),
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16", False, [Level.OK, Level.WARNING]),
        ("avx2", True, [Level.OK, Level.OK]),
        ("sse2", True, [Level.OK, Level.WARNING]),
    ):
        info.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        monkeypatch.setattr(machine, "may_use_amx", lambda allowed=allowed: allowed)
        assert [finding.level for finding in machine.check_cpu(info)] == expected
    assert machine.check_cpu(tmp_path / "nothing")[0].level == Level.WARNING
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.check_cpu(info)[0].level == Level.WARNING


def test_the_system_is_asked_about_amx():
    if machine.platform.machine() == "x86_64" and "amx_tile" in (machine.cpu_flags() or ()):
        import torch

        assert machine.may_use_amx() == torch.cpu._is_amx_tile_supported()


def test_a_device_that_is_not_there(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "DEVICE_FILES", ())
    assert machine.check_devices(Options(device="auto"))[0].level == Level.OK
    assert machine.check_devices(Options(device="cuda"))[0].level == Level.ERROR
    monkeypatch.setattr(machine, "DEVICE_FILES", (str(tmp_path),))
    assert machine.check_devices(Options(device="auto"))[0].level == Level.WARNING
    assert machine.check_devices(Options(device="cpu"))[0].level == Level.OK


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, Level.OK),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, Level.OK),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, Level.ERROR),
    ],
)
def test_telemetry_that_cannot_be_exported(variables, level):
    assert settings.check_telemetry(Options(), variables)[0].level == level


def test_telemetry_without_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    (finding,) = settings.check_telemetry(Options(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"), {})
    assert (finding.level, finding.hint) == (Level.ERROR, "install dragoman[otel]")


def test_a_redis_that_cannot_be_used(monkeypatch):
    url = f"redis://user:a-password@127.0.0.1:{free_port()}/0"
    (finding,) = network.check_redis(Options(redis_url=url))
    assert finding.level == Level.WARNING
    assert "a-password" not in finding.text
    monkeypatch.setitem(sys.modules, "inference.admission.redis_ledger", None)
    (finding,) = network.check_redis(Options(redis_url=url))
    assert (finding.level, "install dragoman[redis]" in finding.text) == (Level.ERROR, True)


def test_a_check_that_fails_hides_no_other():
    def failing():
        raise RuntimeError("beyond repair")

    (finding,) = checked("ports", failing)
    assert (finding.check, finding.level) == ("ports", Level.ERROR)
    assert "beyond repair" in finding.text


def test_people_see_a_line_and_a_hint_for_each(monkeypatch):
    monkeypatch.setenv("DRAGOMAN_HOTS", "x")
    monkeypatch.setenv("DRAGOMAN_FRONT_PORT", "0")
    text = shown(examine(), colours=False)
    assert "error    settings      DRAGOMAN_FRONT_PORT" in text
    assert "did you mean DRAGOMAN_HOST?" in text
    assert text.endswith("1 errors, 1 warnings") or text.endswith("1 errors, 2 warnings")
