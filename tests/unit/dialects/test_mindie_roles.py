"""Roles of MindIE's instances, their links, who may call them, and the one stream of results."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from inference.dialects.mindie.disaggregation.decode import services_of
from inference.dialects.mindie.disaggregation.peers import PeerError, Peers
from inference.dialects.mindie.disaggregation.results import CLOSE, Keyword, Results, message
from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb
from inference.server.grpc import GrpcLimits, GrpcServer
from inference.server.grpc_calls import Timeouts
from inference.server.rotation import ServerTls
from inference.server.tls import TlsFiles
from management.snapshot import ApiKeyEntry, hash_key
from tests.certificates import Authority, replace
from tests.live import free_port
from tests.unit.mindie_instances import Pair, node
from tests.unit.mindie_instances import Results as Reader
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually


async def test_one_reader(pair):
    first = pair.read()
    await eventually(lambda: pair.decode.instance.results.connected)
    second = pair.read()
    assert (await first.call.end()).chunks[-1] == CLOSE
    pair.prefill.serving.worker.default = pair.decode.serving.worker.default = says(" Madrid is far")
    await pair.ask("/infer", {"inputs": "a"})
    assert (await second.until_last("1"))[-1][0] == "lastData"
    second.call.hang_up()
    await eventually(lambda: not pair.decode.instance.results.connected)


async def test_results_wait_for_a_reader(pair):
    pair.prefill.serving.worker.default = pair.decode.serving.worker.default = says(" Madrid is far")
    await pair.ask("/infer", {"inputs": "a"})
    await eventually(lambda: pair.decode.instance.results.unread_bytes)
    assert (await pair.read().until_last("1"))[-1][0] == "lastData"


async def test_who_has_no_results(pair, start):
    answer = await pair.prefill.serving.get("/dresult", plane="mindie")
    error = "Only the Decode node supports dresult but you send to prefill"
    assert (answer.status, answer.json()) == (400, {"error": error, "error_type": "Bad Request"})


async def test_a_role_changes_while_requests_run(pair):
    gate = Gate()
    pair.prefill.serving.worker.default = says(" Madrid is far")
    pair.decode.serving.worker.default = Script(tokens=[*ids(" Madrid is far"), 2], gate_after=2, gate=gate)
    reader = pair.read()
    await pair.ask("/infer", {"inputs": "a"})
    await gate.reached.wait()
    assert (await pair.decode.become("prefill", 2, node(1, pair.prefill.port))).body == b'{"result":"ok"}'
    gate.open()
    assert (await reader.until_last("1"))[-1][0] == "lastData"
    assert (await reader.call.end()).status == 200  # nothing more will come


async def test_status(pair, members):
    status = await pair.prefill.status()
    assert status["service"] == {"roleStatus": "RoleReady", "currentRole": "prefill"}
    assert status["linkStatus"] == {"peers": [{"target": 2, "link": "ok"}]}
    fresh = await members()
    assert (await fresh.status())["service"] == {"roleStatus": "RoleUnknown", "currentRole": "none"}
    answer = await fresh.become("decode", 3, node(4, free_port()))
    assert (answer.status, answer.body) == (200, b'{"result":"ok"}')
    await eventually(lambda: fresh.instance.roles.unhealthy)
    status = await fresh.status()
    assert status["service"] == {"roleStatus": "RoleSwitching", "currentRole": "decode"}
    assert status["linkStatus"] == {"peers": [{"target": 4, "link": "failed : 14"}]}
    live = await fresh.serving.get("/v2/health/live", plane="management")
    assert (live.status, live.json()) == (500, {"message": "DMI connection is unhealthy"})
    for path in ("/health", "/v2/models/demo/ready"):
        assert (await fresh.serving.get(path, plane="management")).status == 500


async def test_former_peers_are_no_longer_called(pair, members):
    """Neither for a client nor for a link: their connections end."""
    other = await members()
    ended = asyncio.Event()

    async def relay(reader, writer):
        there, to = await asyncio.open_connection("127.0.0.1", pair.decode.port)
        await asyncio.gather(copy(reader, to), copy(there, writer), return_exceptions=True)
        ended.set()

    async def copy(reader, writer):
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async with await asyncio.start_server(relay, "127.0.0.1") as between:
        port = between.sockets[0].getsockname()[1]
        await pair.prefill.become("prefill", 1, node(2, port))
        await eventually(lambda: pair.prefill.instance.roles.status == "RoleReady")
        await pair.prefill.become("prefill", 1, node(3, other.port))
        async with asyncio.timeout(30):
            await ended.wait()
    assert (await pair.ask("/infer", {"inputs": "a"}, d_target=f"127.0.0.1;{port}")).status == 400


async def test_the_address_of_services_counts(pair):
    """Controllers tell the machine's address as well; a coordinator's d-target has the other one."""
    peer = {**node(2, pair.decode.port), "host_ip": "192.0.2.1"}
    await pair.prefill.become("prefill", 1, peer)
    await eventually(lambda: pair.prefill.instance.roles.links(False) == [{"target": 2, "link": "ok"}])
    assert (await pair.ask("/infer", {"inputs": "a"})).status == 200


async def test_flexible(members):
    member = await members()
    body = {"local": {**node(1), "p_percentage": 50}}
    assert (await member.serving.post("/v1/role/flex", body, plane="management")).status == 200
    assert (await member.status())["service"] == {
        "roleStatus": "RoleReady", "currentRole": "flex", "p_percentage": 50
    }  # fmt: skip
    refused = await member.become("prefill", 1, node(2))
    error = "Update pd info failed. Reset to previous node status."
    assert (refused.status, refused.json()) == (503, {"error": error, "error_type": "Service Unavailable"})
    headers = {"req_type": "prefill", "req_id": "1", "d_target": f"127.0.0.1;{member.port}"}
    answer = await member.serving.post("/infer", {"inputs": "a"}, plane="mindie", **headers)
    assert "generated_text" in answer.json()


@pytest.mark.parametrize(("role", "body"), [
    ("prefill", {"local": node(1)}),
    ("flex", {"local": {**node(1), "p_percentage": 100}}),
    ("decode", {"local": {k: v for k, v in node(1).items() if k not in ("id", "host_ip")}, "peers": [node(2)]}),
])  # fmt: skip
async def test_a_first_role_needs_peers_and_a_number(members, role, body):
    member = await members()
    answer = await member.serving.post(f"/v1/role/{role}", body, plane="management")
    assert (answer.status, answer.json()["error"]) == (503, "Update pd info failed. Reset to previous node status.")
    assert (await member.status())["service"]["roleStatus"] == "RoleUnknown"


async def test_version_2(members):
    one, other = await members(), await members()
    ranks = [{"dp_inst_id": 20000 + rank, "device": node(2)["device"]} for rank in (0, 1)]
    peer = {"server_ip": "127.0.0.1", "host_ip": "127.0.0.1", "inter_comm_port": other.port, "dp_inst_list": ranks}
    away = {**peer, "inter_comm_port": 1024, "dp_inst_list": [{**ranks[0], "dp_inst_id": 30000}]}
    local = {**peer, "dp_inst_list": [{**ranks[0], "dp_inst_id": 10000}]}
    body = {"local": [local], "peers": [[peer], [away]]}
    assert (await one.serving.post("/v2/role/prefill", body, plane="management")).body == b'{"result":"ok"}'
    await eventually(lambda: one.instance.roles.status == "RoleReady")
    status = (await one.serving.get("/v2/status", plane="management")).json()
    assert status["service"] == {"roleStatus": "RoleReady", "currentRole": "prefill"}
    assert status["linkStatus"] == {"peers": [{"target": 2, "link": "ok"}]}


async def test_too_much_unread_makes_results_wait():
    results = Results(max_unread_bytes=10)
    await results.send("1", Keyword.DATA, b"x" * 20)
    second = asyncio.create_task(results.send("1", Keyword.LAST, b"y"))
    reader = results.read(lambda: False)
    assert not second.done()
    assert await anext(reader) == b""
    assert await anext(reader) == message("1", Keyword.DATA, b"x" * 20) == b"reqId:1\0data:" + b"x" * 20 + b"\0"
    assert await anext(reader) == b"reqId:1\0lastData:y\0"
    await second
    await reader.aclose()
    assert not results.connected


async def test_heartbeats():
    reader = Results(silence_s=0.01).read(lambda: False)
    assert await anext(reader) == b""
    assert await anext(reader) == b"ka:heartbeat\0"
    await reader.aclose()


KEYS = {name: ApiKeyEntry(name, name, hash_key(f"{name}.s"), frozenset({name}), None) for name in ("infer", "manage")}


async def test_keys(members):
    """A request is handed over under the client's own key; results, which are everybody's, need another scope."""
    pair = Pair(*[await members(api_key_required=True) for _ in range(2)])
    for member in (pair.prefill, pair.decode):
        member.serving.keys = KEYS
        member.serving.publish()
        member.serving.worker.default = says(" Madrid is far")
    for member, role, peer in ((pair.prefill, "prefill", pair.decode), (pair.decode, "decode", pair.prefill)):
        body = {"local": node(1), "peers": [node(2, peer.port)]}
        answer = await member.serving.post(
            f"/v1/role/{role}", body, plane="management", authorization="Bearer manage.s"
        )
        assert answer.status == 200, answer.text
    refused = await pair.decode.serving.get("/dresult", plane="mindie", authorization="Bearer infer.s")
    assert refused.status == 403
    call = pair.decode.serving.begin("/dresult", plane="mindie", method="GET", authorization="Bearer manage.s")
    answer = await pair.ask("/infer", {"inputs": "a"}, authorization="Bearer infer.s")
    assert answer.status == 200, answer.text
    assert (await Reader(call).until_last("1"))[-1][0] == "lastData"
    assert pair.decode.serving.worker.submits[-1].tenant.key == "infer"
    message = pb.DecodeParameters(reqId="2", tokens=[1], firstToken=[2], msgType=8)
    with pytest.raises(PeerError) as caught:
        await pair.prefill.instance.peers.decode("127.0.0.1", pair.decode.port, message, {})
    assert caught.value.code == 16


async def test_instances_know_each_other_by_their_certificates(tmp_path, members):
    authority, stranger = Authority(), Authority("stranger")
    files = {}
    for name, issuer in (("one", authority), ("other", authority), ("foreign", stranger)):
        (tmp_path / name).mkdir()
        pair_of_files = issuer.issue().write(tmp_path / name, "instance")
        files[name] = TlsFiles(*pair_of_files, (replace(tmp_path / name / "ca.pem", issuer.pem),))
    port = free_port()
    member = await members()
    handlers = services_of(member.serving.mindie, member.instance, member.serving.services, Timeouts(5, 5), None)
    server = GrpcServer(handlers, "127.0.0.1", port, GrpcLimits(1 << 20, 8, 5), ServerTls(files["one"]))
    await server.start()
    codes = {}
    for name in ("other", "foreign", None):
        peers = Peers(files.get(name))
        codes[name] = await peers.probe("127.0.0.1", port)
        await peers.close()
    await server.stop(0)
    assert codes == {"other": 0, "foreign": 14, None: 14}
