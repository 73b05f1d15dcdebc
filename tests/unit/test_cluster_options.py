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
    network = options(made, worker_host="127.0.0.1", nixl_devices="eth1,mlx5_0:1").network
    completed = network.completed(EngineConfig(model="m"))
    assert (completed.tls.certificate, completed.nixl_devices) == (str(made / "127.0.0.1.pem"), "eth1,mlx5_0:1")


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
        ({"cluster_revocations": "/r"}, "cluster_revocations needs cluster_authority"),
        ({"nixl_devices": "eth1"}, "nixl_devices needs worker_host"),
        ({"nixl_devices": "eth1;eth2"}, "no list of network devices"),
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


def test_revoked_certificates_are_in_a_list_of_the_authority(made, capsys):
    """The list is the only file that changes. It is empty at first, and keeps what was revoked before."""
    before = {path: path.read_bytes() for path in made.iterdir() if path.name != "revocations.pem"}
    authority = x509.load_pem_x509_certificate((made / "authority.pem").read_bytes())
    revoked: list[int] = []
    for names in ((), ("host-a",), ("127.0.0.1", "client"), ("host-a",)):
        if names:
            assert main("dragoman", [str(made), "--revoke", *names]) == 0
        found = [x509.load_pem_x509_certificate((made / f"{name}.pem").read_bytes()).serial_number for name in names]
        revoked = list(dict.fromkeys([*revoked, *found]))
        crl = x509.load_pem_x509_crl((made / "revocations.pem").read_bytes())
        assert crl.is_signature_valid(authority.public_key())
        assert sorted(each.serial_number for each in crl) == sorted(revoked)
        assert crl.next_update_utc == authority.not_valid_after_utc
    assert main("dragoman", [str(made), "--revoke", "host-x"]) == 1
    assert "host-x.pem" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert options(made, cluster_revocations=made / "revocations.pem").network.credentials.revoked.endswith(
        "revocations.pem"
    )


@pytest.mark.parametrize("name", ["authority.pem", "nothing.pem", "127.0.0.1.key"])
def test_what_is_no_revocation_list_is_refused(made, name):
    """A certificate in its place would be trusted like the authority's own."""
    with pytest.raises(CredentialsError, match=f"{name}: .*revocation list"):
        _ = options(made, cluster_revocations=made / name).network


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--revoke"],
        ["--revoke", "authority"],
        ["--revoke", "../x"],
        ["--hosts"],
        ["--hosts", "../x"],
        ["--hosts", "client"],
        ["--hosts", "a", "--days", "0"],
    ],
)
def test_wrong_arguments_make_nothing(tmp_path, arguments):
    with pytest.raises(SystemExit):
        main("dragoman", [str(tmp_path / "tls"), *arguments])
    assert not (tmp_path / "tls").exists()
