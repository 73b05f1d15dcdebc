"""Mutual TLS: its versions, and the keys and passwords that can and cannot be used."""

from __future__ import annotations

import ssl
from types import SimpleNamespace

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from OpenSSL import SSL

from inference.dialects.mindie.config_file import MindieConfigError, read_config
from inference.dialects.mindie.dialect import configure
from inference.dialects.mindie.environment import MindieEnvironment
from inference.dialects.mindie.listeners import tls_files
from inference.server.rotation import ServerTls
from inference.server.tls import TlsError, TlsFiles
from tests.certificates import handshake
from tests.dialects.mindie.config_file import write


def authorities(directory):
    """Two authorities, a server's certificate of the first, and its files where MindIE's keys say."""
    ca, other = trustme.CA(), trustme.CA()
    certificate = ca.issue_cert("127.0.0.1", "localhost")
    for name in ("security/ca", "security/certs", "security/keys"):
        (directory / name).mkdir(parents=True)
    ca.cert_pem.write_to_path(str(directory / "security/ca/ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(directory / "security/certs/server.pem"))
    key = directory / "security/keys/server.key.pem"
    key.touch(mode=0o600)
    certificate.private_key_pem.write_to_path(str(key))
    return ca, other


def encrypt(path, password: bytes) -> None:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))


@pytest.fixture
def files(tmp_path):
    """The service plane's files, as config.json names them."""
    authorities(tmp_path)
    path = write(tmp_path, server={"httpsEnabled": True})
    found = tls_files(read_config(path), "service", path)
    assert found is not None
    return found


@pytest.mark.parametrize("fault", ["short", "other", "no key"])
def test_keys_that_cannot_be_used(files, fault):
    key = rsa.generate_private_key(65537, 2048) if fault == "short" else ec.generate_private_key(ec.SECP256R1())
    lock = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    files.key.write_bytes(b"nothing" if fault == "no key" else pem)
    words = {"short": "3072", "other": "is not the key of", "no key": "no readable private key"}
    with pytest.raises(TlsError, match=words[fault]):
        ServerTls(files)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_an_encrypted_key(files, end):
    encrypt(files.key, b"se cret")
    files.password.parent.mkdir()
    files.password.touch(mode=0o600)
    files.password.write_bytes(b"se cret" + end)
    ServerTls(files)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "server.key.pem: the key is encrypted; .*security/pass/key_pwd.txt: no readable password"),
        (b"", "key_pwd.txt: a password has 1 to 1024 bytes"),
        (b"x" * 1025, "key_pwd.txt: a password has 1 to 1024 bytes"),
        (b"wrong", "server.key.pem: no private key that the password in"),
    ],
)
def test_passwords_that_cannot_be_used(files, content, words):
    encrypt(files.key, b"secret")
    if content is not None:
        files.password.parent.mkdir()
        files.password.touch(mode=0o600)
        files.password.write_bytes(content)
    with pytest.raises(TlsError, match=words):
        ServerTls(files)


def test_an_encrypted_key_without_a_file(files):
    encrypt(files.key, b"secret")
    with pytest.raises(TlsError, match="no file with its password is named"):
        ServerTls(TlsFiles(files.certificate, files.key, files.authorities))


def test_each_plane_has_a_file_of_its_own(tmp_path):
    path = write(tmp_path, server={"httpsEnabled": True, "managementIpAddress": "127.0.0.2", "metricsTlsPkPwd": ""})
    config = read_config(path)
    found = {plane: tls_files(config, plane, path) for plane in ("service", "management", "metrics")}
    assert found["service"].password == tmp_path / "security/pass/key_pwd.txt"
    assert found["management"].password == tmp_path / "security/pass/management/key_pwd.txt"
    assert found["metrics"].password is None


def test_a_plane_without_authorities_would_be_open(tmp_path):
    server = {"httpsEnabled": True, "managementIpAddress": "127.0.0.2", "managementTlsCaFile": []}
    path = write(tmp_path, server=server)
    with pytest.raises(MindieConfigError, match="managementTlsCaFile"):
        tls_files(read_config(path), "management", path)


def test_the_file_and_the_key_are_named_at_start(tmp_path, monkeypatch):
    server = {"httpsEnabled": True, "managementIpAddress": "127.0.0.2", "managementTlsCaFile": []}
    path = write(tmp_path, server=server)
    monkeypatch.setenv("DRAGOMAN_MINDIE_CONFIG", str(path))
    environment = MindieEnvironment(mindie_config=path)
    with pytest.raises(MindieConfigError) as caught:
        configure(environment, SimpleNamespace(host="127.0.0.1"))
    text = f"DRAGOMAN_MINDIE_CONFIG: {path}: ServerConfig.managementTlsCaFile must list at least one file"
    assert str(caught.value) == text


def test_tls_1_3_is_the_oldest_version(tmp_path):
    ca, _ = authorities(tmp_path)
    path = write(tmp_path, server={"httpsEnabled": True})
    factory = ServerTls(tls_files(read_config(path), "service", path))
    client = ssl.create_default_context()
    ca.configure_trust(client)
    ca.issue_cert("client").configure_cert(client)
    assert handshake(factory, client) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(SSL.Error):
        handshake(factory, client)
