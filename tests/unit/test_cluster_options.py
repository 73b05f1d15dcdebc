"""The settings of a cluster of hosts, and the certificates that `cluster-certificates` makes for them."""

from __future__ import annotations

import stat

import pytest
from cryptography import x509
from pydantic import ValidationError

from config.cluster_certificates import main
from config.options import Options
from engine.address import TcpAddress, UnixAddress, parse
from engine.config import EngineConfig
from engine.network.credentials import CredentialsError
from management.launchers import LAUNCHERS


@pytest.fixture
def made(tmp_path):
    assert main("dragoman", [str(tmp_path / "tls"), "--hosts", "host-a", "127.0.0.1"]) == 0
    return tmp_path / "tls"


def options(folder, name: str = "127.0.0.1", **others: object) -> Options:
    files = {"authority": "authority.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
    return Options(**{f"cluster_{what}": folder / file for what, file in files.items()}, **others)


def test_without_settings_workers_listen_on_unix_sockets(tmp_path):
    launcher = LAUNCHERS["local"](tmp_path, Options().network)
    assert isinstance(parse(launcher.address("1-0-1")), UnixAddress)
    assert Options().network.completed(EngineConfig(model="m")).tls is None


def test_with_a_host_they_listen_on_its_ports_and_get_its_certificate(made, tmp_path):
    network = options(made, worker_host="127.0.0.1", worker_ports="23000-23999").network
    for shared in (tmp_path, None):
        launcher = LAUNCHERS["local"](shared, network)
        address = parse(launcher.address("1-0-1"))
        assert isinstance(address, TcpAddress)
        assert (address.host, address.port in range(23000, 24000)) == ("127.0.0.1", True)
        launcher.close()
    assert network.completed(EngineConfig(model="m")).tls.certificate == str(made / "127.0.0.1.pem")


def test_a_port_that_is_taken_is_not_given(made):
    network = options(made, worker_host="127.0.0.1", worker_ports="23500-23500").network
    place = parse(network.address())
    door = place.endpoint(network.credentials)
    door.listen("x")
    with pytest.raises(OSError, match="no free port"):
        network.address()
    door.release("x")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"worker_host": "host-a"}, "never speak plain text over TCP; `cluster-certificates` makes these files"),
        ({"cluster_key": "/k"}, "need each other"),
        ({"cluster_key_password_file": "/p"}, "cluster_key_password_file needs cluster_key"),
        ({"worker_host": "a b"}, "no host name"),
        ({"worker_host": "0.0.0.0"}, "means every address"),
        ({"worker_ports": "5-4"}, "no range of ports"),
        ({"worker_ports": "1-65536"}, "no range of ports"),
        ({"worker_ports": "21000"}, "no range of ports"),
    ],
)
def test_settings_that_are_not_whole_are_refused(wrong, text):
    with pytest.raises(ValidationError, match=text):
        Options(**wrong)


def test_files_that_cannot_be_used_are_refused_at_the_start(made):
    (made / "127.0.0.1.key").chmod(0o644)
    with pytest.raises(CredentialsError, match=r"127\.0\.0\.1\.key: its mode is 0644"):
        _ = options(made).network


def test_certificates_name_their_hosts_and_keys_are_their_owners(made):
    names = {}
    for name in ("host-a", "127.0.0.1", "client"):
        found = x509.load_pem_x509_certificate((made / f"{name}.pem").read_bytes())
        names[name] = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert len(list(usage)) == (1 if name == "client" else 2)
    assert names["host-a"].get_values_for_type(x509.DNSName) == ["host-a"]
    assert [str(each) for each in names["127.0.0.1"].get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.glob("*.key")} == {0o600}


def test_nothing_is_replaced_and_further_hosts_get_the_same_authority(made, capsys):
    before = {path: path.read_bytes() for path in made.iterdir()}
    assert main("dragoman", [str(made), "--hosts", "host-b", "host-a"]) == 1
    assert "host-a.pem is there" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in made.iterdir()} == before
    assert main("dragoman", [str(made), "--hosts", "host-b"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    authority = x509.load_pem_x509_certificate((made / "authority.pem").read_bytes())
    x509.load_pem_x509_certificate((made / "host-b.pem").read_bytes()).verify_directly_issued_by(authority)


@pytest.mark.parametrize(
    "arguments", [["--hosts"], ["--hosts", "../x"], ["--hosts", "client"], ["--hosts", "a", "--days", "0"]]
)
def test_wrong_arguments_make_nothing(tmp_path, arguments):
    with pytest.raises(SystemExit):
        main("dragoman", [str(tmp_path / "tls"), *arguments])
    assert not (tmp_path / "tls").exists()
