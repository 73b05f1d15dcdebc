"""A worker's side of all transfers: what it holds for others, and what it fetches from them. The engine's loop owns it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.block_hashes import cache_key, extend_hashes
from engine.kv_transfer.arrivals import Arrival, Arrivals
from engine.kv_transfer.blocks import CacheBlocks
from engine.kv_transfer.handle import Identity, KvSource, TransferCode, salt_digest, token_digest
from engine.kv_transfer.holds import HOLD_S, Hold, Holds
from engine.kv_transfer.messages import KvStats
from engine.kv_transfer.transport import Wanted
from engine.kv_transfer.transports import transport_for
from engine.models.files import ModelError
from engine.models.identity import model_digest

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from pathlib import Path

    from engine.block_pool import BlockPool
    from engine.config import EngineConfig
    from engine.kv_transfer.messages import Fetch, Pull
    from engine.messages import Stats, Submit
    from engine.request import Request

logger = logging.getLogger(__name__)

MAX_SENDS = 16
"""Receivers that are served at a time; further ones compute their prompts. So many besides that wait for prompts that are computed."""


class Transfers:
    """Holds and arrivals of one engine."""

    def __init__(
        self, config: EngineConfig, directory: Path, cache: Any, pool: BlockPool, original_length: int
    ) -> None:
        """`cache` is the backend's KV cache; `directory` has the files of the model that has just been loaded, and
        `original_length` is its. Raises ModelError.
        """
        self._config, self._cache, self._pool = config, cache, pool
        self._original_length = original_length
        self._model = _digest(config, directory)
        self._transport = transport_for(config)
        self.holds = Holds(pool)
        self._arrivals = Arrivals(self._transport)
        self._sends = threading.BoundedSemaphore(MAX_SENDS)
        self._early_sends = threading.BoundedSemaphore(MAX_SENDS)
        self.failures: Counter[TransferCode] = Counter()
        """Why blocks did not come, of the requests that have started since."""
        self.num_fetched_blocks = 0
        self._used = False
        self._early: dict[str, tuple[Arrival, float]] = {}
        """Arrivals that were asked for ahead of their requests, by transfer, each with the time until which it is kept."""

    def attach(self, request: Request, message: Submit) -> None:
        """Give an accepted request what its message asks for: a hold, and the arrival of its blocks."""
        if self._model is None:
            return
        self._used = True
        if message.hold:
            request.hold = self._hold(request, message.hold)
            self.holds.add(request.hold)
        source = message.source
        needs_prompt = request.params.prompt_logprobs is not None and not message.generated
        if source is not None and (source.num_tokens > self._original_length) != request.is_long:
            # The first token made it a long sequence, and these are the blocks of a short one.
            self._drop_early(source.transfer_id)
        elif source is not None and 0 < source.num_tokens <= len(request.token_ids) and not needs_prompt:
            request.incoming = self._arrival(request, source)

    def fetch(self, message: Fetch) -> None:
        """Fetch blocks ahead of the request that will need them; nothing for what cannot be of use here, or is on its way."""
        source, tokens, size = message.source, message.token_ids, self._config.block_size
        if (
            self._model is None
            or source.transfer_id in self._early
            or not 0 < source.num_tokens == len(tokens) <= self._pool.num_usable * size
        ):
            return
        self._used = True
        hashes: list[bytes] = []
        if self._config.prefix_caching:
            key = cache_key(message.adapter, message.cache_salt, len(tokens) > self._original_length)
            extend_hashes(hashes, key, tokens, len(tokens), size)
        identity = self._identity(message.adapter, message.cache_salt, tokens)
        arrival = self._begin(source, identity, hashes, early=True)
        self._early[source.transfer_id] = arrival, time.monotonic() + HOLD_S

    def release(self, transfer_ids: list[str]) -> None:
        """End these transfers' holds, and drop what has been fetched of them ahead of a request."""
        self.holds.release(transfer_ids)
        self.holds.poll()
        for transfer_id in transfer_ids:
            self._drop_early(transfer_id)

    def poll(self, stats: Stats) -> None:
        """Give back the blocks of holds that are over, and report."""
        if self._used:
            self.holds.poll()
            self._forget_early()
            stats.kv = KvStats(self.holds.num_blocks, self.num_fetched_blocks, dict(self.failures))

    def serve(self, connection: socket.socket, pull: Pull) -> None:
        """Serve a receiver in a thread that owns its connection from now on."""
        threading.Thread(target=self._serve, args=(connection, pull), name="kv-send", daemon=True).start()

    def close(self) -> None:
        """Cancel what is on its way, and hang up on receivers."""
        self._arrivals.close()
        self.holds.close()

    def _serve(self, connection: socket.socket, pull: Pull) -> None:
        hold = self.holds.find(pull.transfer_id)
        sends = self._sends if hold is None or hold.kept else self._early_sends
        if not sends.acquire(blocking=False):
            connection.close()
            return
        try:
            connection.setblocking(True)
            self._transport.serve(connection, pull, self.holds, self._blocks.block_bytes)
        except Exception:  # an outer boundary: a thread of its own
            logger.exception("sending blocks failed")
        finally:
            sends.release()

    def _hold(self, request: Request, transfer_id: str) -> Hold:
        config, count = self._config, len(request.token_ids)
        source = KvSource(config.address, config.worker_id, config.epoch, transfer_id, count, config.block_size)
        return Hold(source, self._of(request, count), self._blocks)

    def _arrival(self, request: Request, source: KvSource) -> Arrival:
        early, _ = self._early.pop(source.transfer_id, (None, 0.0))
        identity = self._of(request, source.num_tokens)
        if early is not None:
            if early.failure is None and early.wanted.identity == identity:
                return early
            early.cancel()
        # Like the scheduler, which takes nothing from the prefix cache for a request with log-probabilities of its prompt.
        hashes = request.block_hashes if request.params.prompt_logprobs is None else []
        full = min(source.num_tokens, len(request.token_ids) - 1) // self._config.block_size
        return self._begin(source, identity, hashes[:full], early=False)

    def _begin(self, source: KvSource, identity: Identity, hashes: Sequence[bytes], early: bool) -> Arrival:
        """Fetch the blocks that the prefix cache does not have now."""
        num_blocks, matched = -(-source.num_tokens // self._config.block_size), len(self._pool.match(hashes))
        wanted = Wanted(identity, source.num_tokens, matched, num_blocks, self._blocks.block_bytes)
        arrival = Arrival(wanted, self._blocks, self._pool, self._note)
        if matched == num_blocks:
            arrival.settle(None)
        else:
            self._arrivals.begin(source, arrival, early)
        return arrival

    def _drop_early(self, transfer_id: str) -> None:
        early, _ = self._early.pop(transfer_id, (None, 0.0))
        if early is not None:
            early.cancel()

    def _forget_early(self) -> None:
        """Drop the early arrivals whose requests have not come."""
        now = time.monotonic()
        for transfer_id, (arrival, until) in list(self._early.items()):
            if now >= until:
                arrival.cancel()
                del self._early[transfer_id]

    def _note(self, fetched_blocks: int, failure: TransferCode | None) -> None:
        self.num_fetched_blocks += fetched_blocks
        if failure is not None:
            self.failures[failure] += 1
            logger.warning("the blocks of a prompt did not come, and it is computed: %s", failure)

    def _of(self, request: Request, num_tokens: int) -> Identity:
        adapter = request.adapter.digest if request.adapter else ""
        return self._identity(adapter, request.cache_salt, request.token_ids[:num_tokens])

    def _identity(self, adapter: str, cache_salt: str, token_ids: Sequence[int]) -> Identity:
        blocks = self._blocks
        salt, tokens = salt_digest(cache_salt), token_digest(token_ids)
        assert self._model is not None  # else nothing is held or fetched
        return Identity(self._model, blocks.dtype, blocks.layout, adapter, salt, tokens)

    @cached_property
    def _blocks(self) -> CacheBlocks:
        return CacheBlocks(self._cache)


def _digest(config: EngineConfig, directory: Path) -> str | None:
    """The model's digest, taken while the files are those that were loaded: they may be replaced under a worker that serves. None:
    the engine exchanges no blocks.
    """
    if config.tensor_parallel_size > 1:  # each rank has a part of every block
        return None
    try:
        return model_digest(directory, config.quantization)
    except (OSError, ValueError, ModelError) as error:
        logger.error("no KV blocks are exchanged, because the model's files cannot be read again: %s", error)
        return None
