"""Which addresses may be served without TLS, and which planes may share one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from config.listeners import Listeners
from config.options import Options
from inference.planes.declaration import GrpcListener
from inference.server.tls import TlsFiles
from tests.certificates import Authority
from tests.conftest import ROOT

PAIR = {"tls_certificate": Path("/tls/server.pem"), "tls_key": Path("/tls/server.key")}


@pytest.fixture
def files(tmp_path):
    return TlsFiles(*Authority().issue().write(tmp_path, "server"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "2001:db8::1", "example.com"])
def test_beyond_loopback_something_must_protect_what_is_sent(host, files):
    for listeners, own, served in (
        (Listeners(), {}, False),
        (Listeners(plain_text=True), {}, True),
        (Listeners(files), {}, True),
        (Listeners(), {"own": files}, True),
        (Listeners(), {"plain_text": True}, True),
    ):
        if served:
            listeners.add((host, 80), None, 1, **own)
            continue
        with pytest.raises(ValueError, match=f"{host}:80 .*DRAGOMAN_TLS_CERTIFICATE .*DRAGOMAN_ALLOW_PLAIN_TEXT"):
            listeners.add((host, 80), None, 1, **own)
        assert not listeners.planes
    with pytest.raises(ValueError, match="DRAGOMAN_BEHIND_TLS"):
        Listeners().add_grpc(GrpcListener(host, 80, None, 1, 1))


@pytest.mark.parametrize(("host", "asks"), [("0.0.0.0", True), ("10.0.0.1", True), ("::", True), ("localhost", False)])
def test_beyond_loopback_keys_are_asked_for_unless_a_setting_says_no(host, asks):
    assert Options(host=host).api_key_required is asks
    assert Options().api_key_required_on(host) is asks
    assert Options(host=host, require_api_key=False).api_key_required is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(host):
    listeners = Listeners()
    listeners.add((host, 80), None, 1)
    listeners.add_grpc(GrpcListener(host, 81, None, 1, 1))
    assert not listeners.tls


def test_planes_that_share_a_port_share_their_files(tmp_path, files):
    """The first plane's TLS would otherwise be the other's, with other clients."""
    other = TlsFiles(files.certificate, files.key, (files.certificate,))
    for first, second in ((files, other), (files, None), (None, files)):
        listeners = Listeners()
        listeners.add(("127.0.0.1", 80), None, 1, first)
        with pytest.raises(ValueError, match="the same files"):
            listeners.add(("127.0.0.1", 80), None, 1, second)
        listeners.add(("127.0.0.1", 80), None, 1, first)
        listeners.add(("127.0.0.1", 81), None, 1, second)


@pytest.mark.parametrize(("given", "named"), [
    ({"tls_certificate": PAIR["tls_certificate"]}, "tls_key"),
    ({"tls_key": PAIR["tls_key"]}, "tls_certificate"),
    ({"tls_client_authorities": ["/tls/ca.pem"]}, "tls_certificate"),
    ({"tls_key_password_file": "/tls/password"}, "tls_certificate"),
    ({**PAIR, "tls_revocation_lists": ["/tls/crl.pem"]}, "tls_client_authorities"),
])  # fmt: skip
def test_settings_that_lack_others(given, named):
    with pytest.raises(ValidationError, match=named):
        Options(**given)
    assert Options(**PAIR, tls_client_authorities=["/tls/ca.pem"]).scheme == "https"


def started(folder, **settings: str) -> subprocess.CompletedProcess[str]:
    """A server that does not come up."""
    environment = {"PATH": "/usr/bin:/bin", "DRAGOMAN_DATA_DIR": str(folder), **settings}
    command = [sys.executable, "-W", "ignore", "manage.py", "serve"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_server_says_which_setting_is_missing(tmp_path):
    done = started(tmp_path, DRAGOMAN_HOST="0.0.0.0")
    assert done.returncode != 0
    for name in ("TLS_CERTIFICATE", "TLS_KEY", "BEHIND_TLS", "ALLOW_PLAIN_TEXT"):
        assert f"DRAGOMAN_{name}" in done.stderr


def test_a_key_that_others_may_read_is_told_at_start(tmp_path):
    certificate, key = Authority().issue().write(tmp_path, "server")
    key.chmod(0o644)
    done = started(tmp_path / "var", DRAGOMAN_TLS_CERTIFICATE=str(certificate), DRAGOMAN_TLS_KEY=str(key))
    assert done.returncode != 0
    assert f"{key}: its mode is 0644" in done.stderr
    assert "Traceback" not in done.stderr
