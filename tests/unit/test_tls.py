"""TLS files: which can be used, whom the contexts let in, and what happens when files change."""

from __future__ import annotations

import os
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from OpenSSL import SSL
from structlog.testing import capture_logs

from inference.server.rotation import ServerTls
from inference.server.tls import TlsError, TlsFiles, read
from tests.certificates import Authority, client_context, handshake, replace, self_signed


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def files(tmp_path, authority):
    """A server's files, without clients' certificates."""
    certificate, key = authority.issue("server").write(tmp_path, "server")
    return TlsFiles(certificate, key, tls_1_2=True)


@pytest.fixture
def mutual(tmp_path, authority, files):
    """The same with an authority of clients and its list, on which nobody is."""
    (authorities, lists) = (tmp_path / "clients.pem", tmp_path / "revoked.pem")
    replace(authorities, authority.pem)
    replace(lists, authority.revoke())
    return TlsFiles(files.certificate, files.key, (authorities,), (lists,), tls_1_2=True)


def old_client(trusted, folder, version):
    context = client_context(trusted, folder)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def test_a_key_that_others_may_read(files):
    for mode, good in ((0o600, True), (0o400, True), (0o640, False), (0o604, False), (0o644, False), (0o660, False)):
        files.key.chmod(mode)
        if good:
            read(files)
            continue
        with pytest.raises(TlsError, match=f"server.key: its mode is 0{mode:o}, which opens the private key"):
            read(files)


def test_a_password_that_others_may_read(tmp_path, authority):
    certificate, key = authority.issue("server").write(tmp_path, "server", b"secret")
    password = replace(tmp_path / "password", b"secret\n")
    read(TlsFiles(certificate, key, password=password))
    password.chmod(0o644)
    with pytest.raises(TlsError, match="its mode is 0644, which opens the password"):
        read(TlsFiles(certificate, key, password=password))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_key_of_another_user(files):
    os.chown(files.key, 12345, -1)
    with pytest.raises(TlsError, match="belongs to another user"):
        read(files)


def test_a_key_that_is_no_file(files):
    files.key.unlink()
    os.mkfifo(files.key, 0o600)
    with pytest.raises(TlsError, match="it is no file"):
        read(files)


@pytest.mark.parametrize(("begin", "end"), [(-2, -1), (1, 2)])
def test_a_certificate_out_of_its_time(tmp_path, authority, begin, end):
    certificate, key = authority.issue("server", begin, end).write(tmp_path, "server")
    with pytest.raises(TlsError, match="which is not now"):
        read(TlsFiles(certificate, key))


def test_a_short_key_and_a_strangers_key(tmp_path, authority):
    short = rsa.generate_private_key(65537, 2048)
    certificate, key = authority.issue("server", key=short).write(tmp_path, "short")
    with pytest.raises(TlsError, match="at least 3072 bits"):
        read(TlsFiles(certificate, key))
    _, other = authority.issue("other").write(tmp_path, "other")
    with pytest.raises(TlsError, match="is not the key of"):
        read(TlsFiles(certificate, other))


def test_a_weak_curve(tmp_path, authority):
    certificate, key = authority.issue("server", key=ec.generate_private_key(ec.SECP192R1())).write(tmp_path, "server")
    with pytest.raises(TlsError, match="OpenSSL does not use it"):
        ServerTls(TlsFiles(certificate, key))


@pytest.mark.parametrize("name", ["certificate", "authorities", "revoked"])
@pytest.mark.parametrize("content", [None, b"", b"nothing"])
def test_files_without_content(mutual, name, content):
    path = getattr(mutual, name)
    path = path if name == "certificate" else path[0]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TlsError, match=str(path)):
        read(mutual)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_versions_and_ciphers(files, authority, tmp_path):
    tls = ServerTls(files)
    assert handshake(tls, client_context(authority, tmp_path)) == "TLSv1.3"
    assert handshake(tls, old_client(authority, tmp_path, ssl.TLSVersion.TLSv1_2)) == "TLSv1.2"
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises((SSL.Error, ssl.SSLError)):
            handshake(tls, old_client(authority, tmp_path, version))
    for weak in ("AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384", "NULL", "DHE"):
        client = client_context(authority, tmp_path)
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        client.set_ciphers(f"{weak}:@SECLEVEL=0")
        with pytest.raises((SSL.Error, ssl.SSLError)):
            handshake(tls, client)


def test_a_client_that_does_not_know_the_authority(files, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ServerTls(files), client_context(Authority("another"), tmp_path))


def clients(authority, good):
    """Who comes to a server that asks for certificates."""
    namesake = Authority(authority.name)
    return {
        "good": good,
        "none": None,
        "self-signed": self_signed(),
        "self-signed with the authority's name": self_signed(authority.name),
        "expired": authority.issue(begin=-3, end=-1),
        "not yet valid": authority.issue(begin=1, end=2),
        "of a foreign authority": Authority("foreign").issue(),
        "of an authority with the same name": namesake.issue(),
        "revoked": authority.issue("revoked"),
    }


def test_who_is_let_in(mutual, authority, tmp_path):
    shown = clients(authority, authority.issue("good"))
    replace(mutual.revoked[0], authority.revoke(shown["revoked"].serial))
    tls = ServerTls(mutual)
    for name, certificate in shown.items():
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            client = client_context(authority, tmp_path, certificate)
            client.minimum_version = client.maximum_version = version
            if name == "good":
                assert handshake(tls, client)
                continue
            with pytest.raises((SSL.Error, ssl.SSLError)):
                handshake(tls, client)


def test_what_the_lists_say(mutual, authority, tmp_path):
    """By OpenSSL's rules: an issuer's list that is out of its time or absent says no to all of its certificates."""
    lists, good, bad = mutual.revoked[0], authority.issue(), authority.issue()
    namesake = Authority(authority.name)
    for content, verdicts in (
        (authority.revoke(bad.serial), (False, True)),
        (authority.revoke(), (False, False)),
        (authority.revoke(begin=-3, end=-1), (True, True)),
        (authority.revoke(bad.serial, begin=1, end=2), (True, True)),
        (Authority("foreign").revoke(), (True, True)),
        (namesake.revoke(), (True, True)),
    ):
        replace(lists, content)
        tls = ServerTls(mutual)
        told = []
        for certificate in (good, bad):
            peer = {"x509_pem_cert": [certificate.pem]}
            told.append(tls.revokes(peer))
            try:
                assert handshake(tls, client_context(authority, tmp_path, certificate))
                refused = False
            except (SSL.Error, ssl.SSLError):
                refused = True
            assert refused == told[-1]
        assert tuple(told) == verdicts
    assert not ServerTls(TlsFiles(mutual.certificate, mutual.key, mutual.authorities)).revokes(peer)


def test_an_intermediate_authority(tmp_path, authority, files):
    between = Authority("between", authority)
    certificate, key = between.issue("server").write(tmp_path, "server")
    authorities = replace(tmp_path / "clients.pem", authority.pem)
    tls = ServerTls(TlsFiles(certificate, key, (authorities,), tls_1_2=True))
    assert handshake(tls, client_context(authority, tmp_path, between.issue("client")))


def test_changed_files_are_used_and_broken_ones_are_not(mutual, authority, tmp_path):
    tls = ServerTls(mutual)
    earlier = tls.getContext()
    tls.reload()
    assert tls.getContext() is earlier
    new = authority.issue("renewed")
    replace(mutual.certificate, new.pem)
    with capture_logs() as logs:
        tls.reload()
        tls.reload()
    assert [line["log_level"] for line in logs] == ["error"]
    assert "is not the key of" in logs[0]["reason"]
    assert tls.getContext() is earlier
    replace(mutual.key, new.key_pem())
    tls.reload()
    assert tls.getContext() is not earlier
    client = authority.issue("client")
    assert handshake(tls, client_context(authority, tmp_path, client))
    replace(mutual.revoked[0], authority.revoke(client.serial))
    tls.reload()
    with pytest.raises((SSL.Error, ssl.SSLError)):
        handshake(tls, client_context(authority, tmp_path, client))
    for path in mutual.paths:
        kept = path.read_bytes()
        for broken in (None, b"", b"nothing", kept[: len(kept) // 2]):
            path.unlink()
            if broken is not None:
                replace(path, broken)
            last = tls.getContext()
            with capture_logs() as logs:
                tls.reload()
            assert tls.getContext() is last
            assert str(path) in logs[0]["reason"]
            replace(path, kept)
            tls.reload()


def test_a_folder_that_a_link_names_is_swapped(tmp_path, authority):
    """As Kubernetes replaces the files of a secret: all at once, by one symbolic link."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        authority.issue(name).write(tmp_path / name, "server")
    link = tmp_path / "current"
    link.symlink_to("first")
    tls = ServerTls(TlsFiles(link / "server.pem", link / "server.key"))
    before = tls.getContext()
    (tmp_path / "next").symlink_to("second")
    os.replace(tmp_path / "next", link)
    tls.reload()
    assert tls.getContext() is not before
