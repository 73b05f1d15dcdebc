"""vLLM's `kv_transfer_params`, by which a proxy sends a prompt to one server and has another one go on with its blocks.

The proxy passes the answer's parameters on as they are. What a client writes there leads only to workers that this server knows, and
only to blocks of the same tokens under the same API key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from inference.generation.requests import RemoteBlocks

if TYPE_CHECKING:
    from inference.generation.generation import Generation

Name = Annotated[str, msgspec.Meta(max_length=512)]


class KvTransferParams(msgspec.Struct):
    """`kv_transfer_params`. The blocks' numbers and the address are the answer's own and need not come back."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_block_ids: Any = None
    remote_host: Any = None
    remote_port: Any = None


def holds(params: KvTransferParams | None, max_tokens: int | None) -> bool:
    """Whether the prompt's blocks are held for another server. vLLM's proxies ask for one token then; longer outputs stay here."""
    return params is not None and bool(params.do_remote_decode) and max_tokens == 1


def blocks(params: KvTransferParams | None) -> RemoteBlocks | None:
    """The blocks that another server computed; None if there are none."""
    if params is None or not params.do_remote_prefill or not params.remote_engine_id or not params.remote_request_id:
        return None
    return RemoteBlocks(params.remote_engine_id, params.remote_request_id)


def answered(generation: Generation) -> dict[str, Any] | None:
    """What an answer says of the blocks that are held."""
    source = generation.held
    if source is None:
        return None
    host, _, port = source.address.removeprefix("tcp://").rpartition(":")
    remote = source.address.startswith("tcp://") and port.isdigit()
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(source.num_blocks)),
        "remote_engine_id": f"{source.worker_id}@{source.epoch}",
        "remote_request_id": source.transfer_id,
        "remote_host": host if remote else source.address,
        "remote_port": int(port) if remote else 0,
        "tp_size": 1,
    }
