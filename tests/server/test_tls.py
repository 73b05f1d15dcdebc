"""A server with mutual TLS on every port: who gets in over HTTP and gRPC, and files that change under running streams."""

from __future__ import annotations

import contextlib
import socket
import ssl

import grpc
import httpx
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as triton
from tests import calls
from tests.certificates import Authority, client_context, replace, self_signed
from tests.cluster import Cluster
from tests.live import LiveServer, free_port, wait_until

MODEL = {"model": "demo"}
STRANGERS = ("none", "self-signed", "expired", "not yet valid", "foreign", "namesake", "revoked")


class Served:
    """The server, its files, and certificates of clients by what is wrong with them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.authority = Authority()
        self.clients = {
            "good": self.authority.issue("good"),
            "none": None,
            "self-signed": self_signed(),
            "expired": self.authority.issue(begin=-3, end=-1),
            "not yet valid": self.authority.issue(begin=1, end=2),
            "foreign": Authority("foreign").issue(),
            "namesake": Authority(self.authority.name).issue(),
            "revoked": self.authority.issue("revoked"),
        }
        self.certificate, self.key = self.authority.issue("server").write(folder, "server", b"secret")
        password = replace(folder / "password", b"secret\n")
        authorities = replace(folder / "clients.pem", self.authority.pem)
        self.lists = replace(folder / "lists.pem", self.authority.revoke(self.clients["revoked"].serial))
        environment = {
            "DRAGOMAN_TLS_CERTIFICATE": str(self.certificate),
            "DRAGOMAN_TLS_KEY": str(self.key),
            "DRAGOMAN_TLS_KEY_PASSWORD_FILE": str(password),
            "DRAGOMAN_TLS_CLIENT_AUTHORITIES": f'["{authorities}"]',
            "DRAGOMAN_TLS_REVOCATION_LISTS": f'["{self.lists}"]',
            "DRAGOMAN_HEADERS_TIMEOUT_S": "2",
            "MIES_SERVICE_MONITOR_MODE": "1",
        }
        self.live = LiveServer(folder / "var", environment=environment, verify=self.context("good"))
        self.torchserve_port = free_port()
        self.live.environment["DRAGOMAN_TORCHSERVE_INFERENCE_PORT"] = str(self.torchserve_port)

    def context(self, name: str) -> ssl.SSLContext:
        return client_context(self.authority, self.folder, self.clients[name])

    @property
    def http_ports(self) -> dict[int, str]:
        """Every HTTP port, and a path on it."""
        live = self.live
        return {
            live.front_port: "/health",
            live.control_port: "/admin/login/",
            live.mindie_port: "/v2",
            live.management_port: "/v1/status",
            live.metrics_port: "/metrics",
            live.djl_port: "/ping",
            self.torchserve_port: "/ping",
        }

    @property
    def grpc_ports(self) -> dict[int, str]:
        """Every gRPC port, and a method on it that takes an empty message."""
        live = self.live
        return {
            live.grpc_port: "/inference.GRPCInferenceService/ServerLive",
            live.torchserve_inference_port: "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping",
            live.torchserve_management_port: "/grpc.health.v1.Health/Check",
        }

    @contextlib.contextmanager
    def channel(self, port: int, name: str, trusted: Authority | None = None):
        shown = self.clients[name]
        pair = (None, None) if shown is None else (shown.key_pem(), shown.pem)
        credentials = grpc.ssl_channel_credentials((trusted or self.authority).pem, *pair)
        # A session of another test's connection would not be a new connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            yield channel

    def call(self, port: int, name: str, trusted: Authority | None = None) -> grpc.StatusCode:
        with self.channel(port, name, trusted) as channel:
            try:
                channel.unary_unary(self.grpc_ports[port])(b"", timeout=60)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    def shown_by(self, port: int) -> bytes:
        """The certificate that a port shows now."""
        with socket.create_connection(("127.0.0.1", port), 20) as plain:
            context = self.context("good")
            if port in self.grpc_ports:
                context.set_alpn_protocols(["h2"])
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                return connection.getpeercert(True)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("tls"))
    made.live.start()
    yield made
    assert made.live.stop() == 0, made.live.log


def test_every_port_speaks_tls_with_those_who_have_a_certificate(served):
    for port, path in served.http_ports.items():
        answer = httpx.get(f"https://127.0.0.1:{port}{path}", verify=served.context("good"))
        assert answer.status_code == 200, (port, path, answer.text)
    for port in served.grpc_ports:
        assert served.call(port, "good") == grpc.StatusCode.OK
    body = {**MODEL, "prompt": "The capital of France is", "max_tokens": 4, "ignore_eos": True}
    assert served.live.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_get_no_answer_over_http(served, name):
    for port, path in served.http_ports.items():
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"https://127.0.0.1:{port}{path}", verify=served.context(name), timeout=60)


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_get_no_answer_over_grpc(served, name):
    expected = grpc.StatusCode.UNAUTHENTICATED if name == "revoked" else grpc.StatusCode.UNAVAILABLE
    for port in served.grpc_ports:
        assert served.call(port, name) == expected, port


def test_a_revoked_client_streams_nothing(served):
    request = triton.ModelInferRequest(model_name="demo").SerializeToString()
    with served.channel(served.live.grpc_port, "revoked") as channel:
        for method in ("ModelStreamInfer", "NoSuchMethod"):
            stream = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError):
                list(stream(iter([request]), timeout=60))


def test_clients_that_do_not_know_the_servers_authority(served):
    stranger = client_context(Authority("another"), served.folder, served.clients["good"])
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{served.live.front_port}/health", verify=stranger)
    code = served.call(served.live.grpc_port, "good", Authority("another"))
    assert code == grpc.StatusCode.UNAVAILABLE


def test_plain_text_is_not_answered(served):
    for port, path in served.http_ports.items():
        with pytest.raises(httpx.HTTPError):
            calls.get(f"http://127.0.0.1:{port}{path}", timeout=60)
    for port, method in served.grpc_ports.items():
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(method)(b"", timeout=60)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_who_does_not_shake_hands_is_hung_up_on(served):
    ports = (*served.http_ports, *served.grpc_ports)
    for silent in [socket.create_connection(("127.0.0.1", port), 30) for port in ports]:
        with silent, contextlib.suppress(ConnectionResetError):
            while silent.recv(4096):
                pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_is_resumed(served, version):
    """It would keep a client in that is revoked meanwhile."""
    context = served.context("good")
    context.minimum_version = context.maximum_version = version
    session = None
    for _ in range(2):
        plain = socket.create_connection(("127.0.0.1", served.live.front_port), 20)
        with plain, context.wrap_socket(plain, server_hostname="localhost", session=session) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            assert not connection.session_reused
            session = connection.session


def test_cookies_of_the_admin_are_secure(served):
    live = served.live
    password = (live.data_dir / "admin-password").read_text().strip()
    with httpx.Client(base_url=live.admin_url, verify=served.context("good")) as browser:
        form = browser.get("/admin/login/")
        token = browser.cookies["csrftoken"]
        body = {"username": "admin", "password": password, "csrfmiddlewaretoken": token, "next": "/admin/"}
        # Over TLS a form must come from a page of this server.
        strange = {"origin": "https://attacker.example"}
        assert browser.post("/admin/login/", data=body, headers=strange).status_code == 403
        assert browser.post("/admin/login/", data=body).status_code == 403
        entered = browser.post("/admin/login/", data=body, headers={"referer": f"{live.admin_url}/admin/login/"})
        assert entered.status_code == 302, entered.text
        for answer, name in ((form, "csrftoken"), (entered, "sessionid")):
            cookie = next(value for value in answer.headers.get_list("set-cookie") if value.startswith(f"{name}="))
            assert "Secure" in cookie
            assert "SameSite=Strict" in cookie
            assert ("HttpOnly" in cookie) == (name == "sessionid")
        assert browser.get("/admin/").status_code == 200
        assert 'href="http://' not in browser.get("/admin/").text


def test_new_files_are_used_while_streams_go_on(served):
    live = served.live
    ports = (*served.http_ports, *served.grpc_ports)
    before = {port: served.shown_by(port) for port in ports}
    body = {**MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with live_stream(live, body) as lines, served.channel(live.grpc_port, "good") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert call(b"", timeout=60)
        next(lines)
        renewed = served.authority.issue("renewed")
        replace(served.key, renewed.key_pem())  # the pair does not fit until the certificate is there too
        wait_until(lambda: "changed TLS files cannot be used" in live.log)
        assert {port: served.shown_by(port) for port in ports} == before
        replace(served.certificate, renewed.pem)
        new = ssl.PEM_cert_to_DER_cert(renewed.pem.decode())
        wait_until(lambda: all(served.shown_by(port) == new for port in ports))
        assert call(b"", timeout=60)  # on the connection of before
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
    replace(served.certificate, b"-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    wait_until(lambda: "no readable certificate" in live.log)
    assert served.call(live.grpc_port, "good") == grpc.StatusCode.OK
    assert live.get("/health").status_code == 200
    replace(served.certificate, renewed.pem)


def test_a_client_is_revoked_while_the_server_runs(served):
    """Also on a gRPC connection that is open; an HTTP connection lasts until its end."""
    live = served.live
    served.clients["leaver"] = served.authority.issue("leaver")
    with served.channel(live.grpc_port, "leaver") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert call(b"", timeout=60)
        revoked = [served.clients[name].serial for name in ("revoked", "leaver")]
        replace(served.lists, served.authority.revoke(*revoked))

        def refused():
            try:
                call(b"", timeout=60)
            except grpc.RpcError as error:
                return error.code() == grpc.StatusCode.UNAUTHENTICATED
            return False

        wait_until(refused)
    with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
        httpx.get(f"https://127.0.0.1:{live.front_port}/health", verify=served.context("leaver"))
    assert live.get("/health").status_code == 200


def test_nothing_of_the_key_is_logged(served):
    log = served.live.log
    assert "secret" not in log
    assert "PRIVATE KEY" not in log
    for line in served.key.read_text().splitlines()[1:-1]:
        assert line not in log


def test_processes_that_share_their_ports_share_their_files(tmp_path):
    authority = Authority()
    certificate, key = authority.issue("server").write(tmp_path, "server")
    cluster = Cluster(tmp_path / "var", {"DRAGOMAN_TLS_CERTIFICATE": str(certificate), "DRAGOMAN_TLS_KEY": str(key)})
    trusting = client_context(authority, tmp_path)
    trusting.set_alpn_protocols(["h2", "http/1.1"])

    def shown(port: int) -> bytes:
        plain = socket.create_connection(("127.0.0.1", port), 20)
        with plain, trusting.wrap_socket(plain, server_hostname="localhost") as connection:
            return connection.getpeercert(True)

    try:
        cluster.run("migrate", "--verbosity", "0")
        for process in [cluster.start("web"), cluster.start("web")]:
            listening = cluster.runtime / f"{process.pid}.listeners"
            wait_until(listening.exists, 60, lambda: cluster.log)
        url = f"https://127.0.0.1:{cluster.front_port}/v2/health/live"
        wait_until(lambda: httpx.get(url, verify=trusting).status_code == 200, 60, lambda: cluster.log)
        renewed = authority.issue("renewed")
        replace(key, renewed.key_pem())
        replace(certificate, renewed.pem)
        new = ssl.PEM_cert_to_DER_cert(renewed.pem.decode())
        wait_until(lambda: cluster.log.count("TLS files reloaded") == 2, 60, lambda: cluster.log)
        for port in (cluster.front_port, cluster.control_port, cluster.grpc_port):
            assert {shown(port) for _ in range(20)} == {new}
    finally:
        cluster.stop()


@contextlib.contextmanager
def live_stream(live, body):
    """The lines of a stream that runs."""
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, verify=live.verify, timeout=120) as answer:
        yield (line for line in answer.iter_lines() if line)
