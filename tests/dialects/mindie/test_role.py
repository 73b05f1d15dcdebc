"""POST /v1/role/{role} and /v2/role/{role}: the body's rules, and the refusal to take another role."""

from __future__ import annotations

import copy

import pytest

DEVICE = {"device_id": "0", "device_ip": "29.0.0.1", "device_logical_id": "0", "rank_id": "0"}
NODE = {"server_ip": "10.0.0.1", "host_ip": "10.0.0.1", "id": 1, "device": [DEVICE]}
BODY = {"local": NODE, "peers": [{**NODE, "id": 2}]}
NODE_2 = {"server_ip": "10.0.0.1", "dp_inst_list": [{"dp_inst_id": 10000, "device": [DEVICE]}]}
BODY_2 = {"local": [NODE_2], "peers": [[NODE_2]]}
BAD = (
    b'{"error":"Req body converts to json fail. Reset to previous node status.","error_type":"Input validation error"}'
)
NO = b'{"error":"Update pd info failed. Reset to previous node status.","error_type":"Service Unavailable"}'


@pytest.mark.parametrize("role", ["prefill", "decode", "flex"])
def test_another_role_is_refused(mindie, role):
    answer = mindie.post(f"/v1/role/{role}", BODY, management=True)
    assert (answer.status_code, answer.content) == (503, NO)
    assert mindie.manage("/v1/status").json()["service"] == {"roleStatus": "RoleReady", "currentRole": "none"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_another_role_is_refused_in_version_2(mindie, role):
    answer = mindie.post(f"/v2/role/{role}", BODY_2, management=True)
    assert (answer.status_code, answer.content) == (503, NO)


@pytest.mark.parametrize("path", ["/v1/role/master", "/v1/role/none", "/v2/role/flex"])
def test_other_words_are_no_route(mindie, path):
    assert mindie.post(path, BODY, management=True).status_code == 404


def changed(**changes):
    body = copy.deepcopy(BODY)
    body["local"].update(changes)
    return body


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {},
        {"local": None},
        changed(server_ip="host"),
        changed(server_ip=None),
        changed(device=[]),
        changed(device=[{**DEVICE, "device_id": 0}]),
        changed(device=[{**DEVICE, "device_ip": "x"}]),
        changed(p_percentage=101),
        changed(p_percentage=-1),
        {**BODY, "peers": [{}]},
        {"local": {k: v for k, v in NODE.items() if k != "host_ip"}},
    ],
)
def test_malformed(mindie, body):
    answer = mindie.post("/v1/role/prefill", body, management=True)
    assert (answer.status_code, answer.content) == (422, BAD)


def test_peers_may_be_absent(mindie):
    assert mindie.post("/v1/role/prefill", {"local": NODE}, management=True).status_code == 503


def test_malformed_in_version_2(mindie):
    assert mindie.post("/v2/role/decode", {"local": [{}]}, management=True).status_code == 422
    answer = mindie.post("/v2/role/decode", {"local": {}}, management=True)
    assert answer.json()["error"] == "Parse req json failed. Reset to previous node status."
