"""The bodies of role requests, of both versions, as orders; every field is checked first. It changes no role."""

from __future__ import annotations

import ipaddress
from typing import Any

from inference.dialects.mindie.disaggregation.roles import Node, Order, Role
from inference.dialects.mindie.errors import MindieError

ERROR_TYPE = "Input validation error"
BAD_BODY = "Req body converts to json fail. Reset to previous node status."
BAD_SHAPE = "Parse req json failed. Reset to previous node status."
RANKS = 10_000
"""The number of an instance's rank is that of the instance times this, plus the rank."""


def malformed() -> MindieError:
    """The error of a body that breaks a rule."""
    return MindieError(422, BAD_BODY, ERROR_TYPE)


def order_of(role: Role, body: dict[str, Any]) -> Order:
    """The order in a body of version 1; raises MindieError."""
    peers = body.get("peers") or []
    nodes = [body.get("local"), *(peers if isinstance(peers, list) else [None])]
    if not all(_is_node(node, "device") for node in nodes):
        raise malformed()
    local, *others = nodes
    return Order(role, (_node(local),), _addresses(local), tuple(map(_node, others)), local.get("p_percentage"))


def order_of_v2(role: Role, body: dict[str, Any]) -> Order:
    """The order in a body of version 2, whose instances span several nodes; raises MindieError."""
    local, peers = body.get("local"), body.get("peers") or []
    if not isinstance(local, list) or not isinstance(peers, list) or not all(isinstance(p, list) for p in peers):
        raise MindieError(503, BAD_SHAPE)
    if not local or not all(_is_node(node, "dp_inst_list") for nodes in (local, *peers) for node in nodes):
        raise malformed()
    others = [part for nodes in peers for node in nodes for part in _parts(node)]
    own = [part for node in local for part in _parts(node)]
    addresses = frozenset(address for node in local for address in _addresses(node))
    return Order(role, tuple(own), addresses, tuple(others))


def _node(node: dict[str, Any]) -> Node:
    return Node(node["server_ip"], node.get("id"), 0, node.get("inter_comm_port"))


def _parts(node: dict[str, Any]) -> list[Node]:
    """One for each data-parallel rank of a node."""
    numbers = [item["dp_inst_id"] for item in node["dp_inst_list"]]
    return [Node(node["server_ip"], n // RANKS, n % RANKS, node.get("inter_comm_port")) for n in numbers]


def _addresses(node: dict[str, Any]) -> frozenset[str]:
    """An instance's own addresses: that of its services, and that of the machine which its container is on."""
    return frozenset((node["server_ip"], node.get("host_ip") or node["server_ip"]))


def _is_node(node: Any, devices_key: str) -> bool:
    """Whether a node of a role's body has the fields that both versions require."""
    if not isinstance(node, dict) or not _is_address(node.get("server_ip")):
        return False
    if not _is_address(node.get("host_ip", "0.0.0.0")) or not _is_count(node.get("id", 0), (1 << 64) - 1):
        return False
    if not _is_count(node.get("inter_comm_port", 1024), 65535) or node.get("inter_comm_port", 1024) < 1024:
        return False
    listed = node.get(devices_key)
    if not isinstance(listed, list) or not listed:
        return False
    if ("id" in node) != ("host_ip" in node) and devices_key == "device":
        return False
    if not _is_count(node.get("p_percentage", 0), 100):
        return False
    if devices_key == "dp_inst_list":
        return all(
            isinstance(item, dict)
            and _is_count(item.get("dp_inst_id"), (1 << 64) - 1)
            and _are_devices(item.get("device"))
            for item in listed
        )
    return _are_devices(listed)


def _are_devices(devices: Any) -> bool:
    return (
        isinstance(devices, list)
        and bool(devices)
        and all(
            isinstance(device, dict)
            and _is_number(device.get("device_id"))
            and _is_number(device.get("device_logical_id"))
            and _is_address(device.get("device_ip"))
            and all(_is_number(device.get(key, "0")) for key in ("rank_id", "super_device_id"))
            for device in devices
        )
    )


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_number(value: Any) -> bool:
    """Whether the value is a number written as a string."""
    return isinstance(value, str) and value.isascii() and value.isdigit()


def _is_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and ipaddress.IPv4Address(value) is not None
    except ValueError:
        return False
