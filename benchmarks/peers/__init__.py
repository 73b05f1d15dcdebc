"""The servers that can be measured: a file and a line here for each."""

from __future__ import annotations

from benchmarks.peers.base import Peer
from benchmarks.peers.dragoman import Dragoman
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.transformers import Transformers
from benchmarks.peers.vllm import Vllm

OURS = Dragoman()
PEERS: dict[str, Peer] = {peer.name: peer for peer in (Vllm(), OpenVino(), LlamaCpp(), Transformers())}
