"""The engine core of a text model: takes requests and returns outputs, one step at a time. It knows no sockets."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
import torch

from engine import faults
from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.adapters.slots import AdapterSlots
from engine.block_pool import BlockPool
from engine.cpu.kernels.threads import set_num_threads
from engine.devices import backend_for
from engine.engine import ClientOutputs, EngineBroken, refused
from engine.failures import Failure, FailureCode, FinishReason
from engine.gates.adapter import AdapterGate
from engine.gates.grammar import GrammarGate
from engine.gates.offload import OffloadGate
from engine.grammar.patience import Patience
from engine.grammar.processes import GrammarProcesses
from engine.kv_transfer.transfers import Transfers
from engine.messages import (
    AdapterCommand,
    Embed,
    RequestOutput,
    Stats,
    StepHistograms,
    Submit,
    TokenLogprob,
)
from engine.model_runner import LaunchedStep, ModelRunner, StepResult
from engine.models.prepared import model_info, prepare
from engine.offload.offload import offload_for
from engine.policies.base import policy
from engine.process.cpus import usable_cpus
from engine.process.progress import Pace, progress
from engine.prompt_logits import max_prompt_rows
from engine.request import Request, RequestStatus
from engine.scheduled_batch import ScheduledBatch
from engine.scheduler import Scheduler
from engine.step_record import Step, recorded
from engine.step_time import StepTime
from engine.warm_up import time_steps, warm_up

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.config import EngineConfig
    from engine.gates.base import Gate

logger = logging.getLogger(__name__)

WAIT_S = 0.005
"""Seconds to wait for a grammar process when no sequence can run."""


class EngineCore:
    """One model, its KV cache and its requests. Not thread-safe: one loop owns it."""

    def __init__(self, config: EngineConfig, backend: Backend | None = None) -> None:
        """Load the model; raises ModelError if it cannot be served. `backend` defaults to that of the configured
        device.
        """
        threads = config.threads or usable_cpus()
        torch.set_num_threads(threads)
        set_num_threads(threads)
        backend = backend or backend_for(config)
        if not backend.computes_drafts:
            config = msgspec.structs.replace(config, speculative_tokens=0)
        prepared = prepare(config, backend)
        loaded, limit = prepared.loaded, prepared.longest
        if loaded.rounding is None:
            logger.info("batch-invariant: a sequence's logits do not depend on the rest of the batch")
        else:
            logger.info("not batch-invariant: %s", loaded.rounding)
        self.config, self.specs, self.backend = config, loaded.specs, backend
        pool = BlockPool(prepared.cache.num_blocks, config.block_size, config.prefix_caching)
        self.adapters = AdapterSlots(
            loaded.lora_layers, config.max_adapters, config.max_cached_adapters, config.max_adapter_rank
        )
        self.grammars = GrammarProcesses(loaded.tokenizer_file, loaded.vocab_size, loaded.eos_token_ids)
        if config.address:  # a worker: start the template process now, so that the first grammar does not wait for it
            self.grammars.start()
        self._step_time = StepTime()
        gates: list[Gate] = [GrammarGate(), AdapterGate(self.adapters)]
        self.offload = offload_for(config, prepared, pool)
        if self.offload is not None:
            gates.append(OffloadGate(self.offload, pool, self._step_time, config.max_num_batched_tokens))
        rows, scheduling = max_prompt_rows(loaded.vocab_size), policy(config.scheduling_policy)
        self.scheduler = Scheduler(
            config, pool, limit, loaded.eos_token_ids, scheduling, gates, self._step_time, rows, loaded.original_length
        )
        self.runner = ModelRunner(backend, loaded, prepared.cache)
        self.requests: dict[tuple[int, int], Request] = {}
        self.stats = Stats(blocks_total=pool.num_usable)
        self.histograms = StepHistograms()
        self._pace = Pace(len(loaded.specs))
        self._running: Step | None = None
        """The launched step whose tokens have not been read."""
        warm_up(self.runner, loaded.lora_layers, limit, self._pace)
        time_steps(self.runner, config, limit, self._pace, self._step_time)
        self._last_read = 0.0
        self._unsettled: dict[Request, TokenLogprob | None] = {}
        """Requests whose last token is withheld until their grammar process says whether it ends the text; each with
        the token's log-probability, if the client asked for it.
        """
        self._patience = Patience()
        self.failed_steps = 0
        self.blocked = False
        """Whether the last step could do nothing because every request waits for an adapter."""
        self.info = model_info(prepared, config, backend.device.type)
        self.transfers = Transfers(config, loaded.directory, prepared.cache, pool, loaded.original_length)

    def submit(self, client: int, message: Submit | Embed) -> RequestOutput | None:
        """Queue a client's request. Returns its only output if it is refused, else None."""
        if isinstance(message, Embed):
            return refused(message, Failure(FailureCode.MAKES_NO_EMBEDDINGS))
        now = time.monotonic()
        request = Request(
            key=(client, message.request_id),
            token_ids=list(message.prompt_token_ids),
            params=message.params,
            # A sequence that has begun elsewhere goes before the requests of its flow that came later than it did there.
            arrival=now - max(0.0, message.age_s) if message.generated else now,
            priority=message.priority,
            cache_salt=message.cache_salt,
            adapter=message.adapter,
            deadline=None if message.timeout_s is None else now + message.timeout_s,
            tenant=message.tenant,
            band=message.band,
        )
        request.token_ids += message.generated
        if message.generated:  # the first of them came after the last of these
            request.num_prompt_logprobs = request.num_prompt_tokens - 1
        known = request.key in self.requests or message.hold in self.transfers.holds
        failure = Failure(FailureCode.REQUEST_ID_IN_USE) if known else self._enqueue(request)
        if failure is not None:
            return refused(message, failure)
        if message.params.grammar is not None:
            request.matcher = self.grammars.open(message.params.grammar)
            if message.generated:
                request.matcher.replay(message.generated)
        self.requests[request.key] = request
        if message.hold or message.source is not None:
            self.transfers.attach(request, message)
        return None

    def command(self, message: AdapterCommand) -> AdapterFailure | None:
        """Execute an adapter command; a load is only started. Returns the reason if it fails, else None."""
        self.adapters.poll(busy=bool(self.scheduler.running))
        if message.action == "load":
            refusal = self.adapters.request(message.adapter)
            if refusal is None and not self.adapters.begin(message.adapter, keep=self._busy_adapters):
                refusal = AdapterFailure(AdapterCode.CACHE_IN_USE)
            return refusal
        if message.action == "unload":
            return self.adapters.unload(message.adapter.digest, self._busy_adapters)
        return self.adapters.pin(message.adapter, message.action == "pin")

    @property
    def _busy_adapters(self) -> set[str]:
        """Digests of the adapters that requests use."""
        return {r.adapter.digest for r in self.requests.values() if r.adapter is not None}

    def loading(self, digest: str) -> bool:
        """Whether an adapter is being read."""
        self.adapters.poll(busy=bool(self.scheduler.running))
        return self.adapters.loading(digest)

    def load_failure(self, digest: str) -> AdapterFailure | None:
        """Why an adapter could not be loaded; None if it was."""
        return self.adapters.failure(digest)

    def abort(self, client: int, request_ids: list[int]) -> None:
        """Mark requests for removal at the next step."""
        for request_id in request_ids:
            request = self.requests.get((client, request_id))
            if request is not None:
                request.dropped = FinishReason.ABORT

    def abort_client(self, client: int) -> None:
        """Mark all requests of a disconnected client for removal at the next step."""
        self.abort(client, [request_id for owner, request_id in self.requests if owner == client])

    def hand_over(self) -> None:
        """Mark all requests as moved; the next step ends them."""
        for request in self.requests.values():
            request.dropped = request.dropped or FinishReason.MOVED

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or a launched step is unread."""
        return self.scheduler.has_work or self._running is not None

    def step(self) -> ClientOutputs:
        """One iteration: schedule, launch, read, update, publish.

        On a device that runs asynchronously, `step` reads the tokens of the previous step while the device computes the
        current one. A sequence that ended in the previous step still has a row in the current one; that token is
        discarded.
        """
        outputs: ClientOutputs = {}
        self.grammars.poll()
        self._settle(outputs)
        self._publish_dropped(self.scheduler.expire(time.monotonic()), outputs)
        batch = self.scheduler.schedule(self.transfers.holds.awaited)
        before, self._running = self._running, None
        self.blocked = not batch.requests and before is None and self.scheduler.has_work
        if self.blocked and self.grammars.users:
            self.grammars.wait(WAIT_S)
            self.blocked = False
        launched = self._launch(batch) if batch.requests else None
        if before is not None:
            waited_for = launched if launched is not None and isinstance(launched.result, StepResult) else None
            self._read(before, outputs, None if waited_for is None else waited_for.begin)
        if launched is not None and isinstance(launched.result, LaunchedStep):
            self._running = launched
        elif launched is not None:
            self._read(launched, outputs)
        elif batch.requests:
            self._fail(batch, outputs)
        if self._unsettled:
            self.grammars.settle(self._patience.seconds)
            self._settle(outputs)
        return outputs

    def check_integrity(self) -> None:
        """Called when idle; raises EngineBroken unless no request is known and every block is free."""
        self.scheduler.pool.check_integrity()
        free = self.scheduler.pool.num_free + self.transfers.holds.num_blocks
        if self.requests or self.grammars.users or free != self.scheduler.pool.num_usable:
            raise EngineBroken(f"idle with {len(self.requests)} requests and blocks in use")

    def close(self) -> None:
        """Stop the adapter loader thread, the grammar processes, the transfers, the KV offload and the backend."""
        self.transfers.close()
        self.adapters.close()
        self.grammars.close()
        if self.offload is not None:
            self.offload.close()
        self.backend.close()

    def refresh_stats(self) -> Stats:
        """The counters, with the gauges updated."""
        self.adapters.poll(busy=bool(self.scheduler.running))
        self.transfers.poll(self.stats)
        self.grammars.end_idle()
        scheduler, stats = self.scheduler, self.stats
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.blocks_used = scheduler.pool.num_usable - scheduler.pool.num_free
        stats.preemptions = scheduler.num_preemptions
        stats.adapters, stats.failed_adapters = self.adapters.in_slots, self.adapters.failures
        stats.prefix_queries, stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        stats.offload = None if self.offload is None else self.offload.stats()
        return stats

    def _enqueue(self, request: Request) -> Failure | None:
        """Check a request and add it to the scheduler's queue; returns why it is refused, else None."""
        ids, limit = request.token_ids, request.params.max_tokens
        if not request.num_prompt_tokens:
            return Failure(FailureCode.EMPTY_PROMPT)
        if request.num_output_tokens and request.num_output_tokens >= limit:
            return Failure(FailureCode.NOTHING_LEFT, {"tokens": request.num_output_tokens, "limit": limit})
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            return Failure(FailureCode.OUT_OF_VOCABULARY, {"highest": self.info.vocab_size - 1})
        return self.scheduler.add(request)

    def _launch(self, batch: ScheduledBatch) -> Step | None:
        """Launch a step; None if it failed, which may be due to its requests."""
        begin = time.monotonic()
        progress.begin("computing a step", self._pace.expected_s(batch.total_tokens))
        chunks = batch.chunks
        record = recorded(begin, batch, chunks, self.scheduler)
        try:
            if faults.armed:
                faults.hit("step", lambda: {str(token) for request in batch.requests for token in request.token_ids})
            result = self.runner.launch(batch)
        except Exception:  # an outer boundary: the batch fails, the engine goes on
            logger.exception("step failed", extra={"requests": len(batch.requests)})
            record.failed = True
            return None
        self.scheduler.launched(batch, result.requests if isinstance(result, LaunchedStep) else ())
        return Step(batch, result, begin, chunks, record)

    def _read(self, step: Step, outputs: ClientOutputs, next_begin: float | None = None) -> None:
        """Read the results of a launched step. Its duration ends at `next_begin` if the host has already computed the
        next step synchronously, else now.
        """
        result = step.result
        if isinstance(result, LaunchedStep):
            try:
                result = result.result()
            except Exception:  # as above: a device reports its failures late
                logger.exception("step failed", extra={"requests": len(step.batch.requests)})
                step.record.failed = True
                self._fail(step.batch, outputs)
                return
        self.failed_steps = 0
        now, stats = next_begin or time.monotonic(), self.stats
        elapsed, self._last_read = now - max(step.begin, self._last_read), now
        self._pace.learn(step.batch.total_tokens, elapsed)
        step.record.elapsed_s, chunks = elapsed, step.chunks
        self._step_time.learn(elapsed, len(step.batch.requests) - len(chunks), chunks, step.batch.bounded)
        stats.steps += 1
        prompts = len(chunks)
        self.histograms.add_step(elapsed, len(step.batch.requests), prompts)
        if not prompts:
            stats.decode_steps, stats.decode_s = stats.decode_steps + 1, stats.decode_s + elapsed
            self._patience.note(elapsed)
        else:
            stats.prefill_steps, stats.prefill_s = stats.prefill_steps + 1, stats.prefill_s + elapsed
        begin = time.monotonic()
        finished = self.scheduler.update(step.batch, result.tokens)
        if self.offload is not None:
            self.offload.save()
        step.record.finished = len(finished)
        self.histograms.add_drafted(result.tokens.values())
        stats.generation_tokens += sum(map(len, result.tokens.values()))
        for request in [request for request in result.tokens if request.matcher is not None]:
            del result.tokens[request]
            self._unsettled[request] = result.logprobs.pop(request, [None])[0]
        self._publish(step.batch.requests, result, finished, outputs)
        self.histograms.add_publishing(time.monotonic() - begin, is_decode=not prompts)

    def _settle(self, outputs: ClientOutputs) -> None:
        """Publish withheld tokens whose grammar process has answered or failed."""
        self._unsettled = {r: kept for r, kept in self._unsettled.items() if r.status is not RequestStatus.FINISHED}
        settled = [r for r in self._unsettled if not r.waits_for_grammar]
        if not settled:
            return
        result = StepResult()
        for request in settled:
            result.tokens[request] = [request.token_ids[-1]]
            logprob = self._unsettled.pop(request)
            if logprob is not None:
                result.logprobs[request] = [logprob]
        self._publish(settled, result, self.scheduler.settle(settled), outputs)

    def _fail(self, batch: ScheduledBatch, outputs: ClientOutputs) -> None:
        self.failed_steps += 1
        self.histograms.failed += 1
        failed = [request for request in batch.requests if request.status is not RequestStatus.FINISHED]
        for request in failed:
            self.scheduler.finish(request)
        if self.offload is not None:
            self.offload.forget_filled()
        self._publish(failed, StepResult(), dict.fromkeys(failed, FinishReason.ERROR), outputs)

    def _publish_dropped(self, dropped: list[tuple[Request, FinishReason]], outputs: ClientOutputs) -> None:
        """Publish the final output of requests that were dropped between steps."""
        for request, reason in dropped:
            output = RequestOutput(request.key[1], finish_reason=reason, preemptions=request.num_preemptions)
            output.error = request.failure
            outputs.setdefault(request.key[0], []).append(output)
            del self.requests[request.key]

    def _publish(
        self,
        requests: list[Request],
        result: StepResult,
        finished: dict[Request, FinishReason],
        outputs: ClientOutputs,
    ) -> None:
        """Add the requests' outputs to `outputs`, by client, and forget the finished requests."""
        tokens_of_step = sum(map(len, result.tokens.values()))
        for request in requests:
            finish_reason = finished.get(request)
            tokens = result.tokens.get(request, [])
            prompt_logprobs = result.prompt_logprobs.get(request)
            if not tokens and finish_reason is None and prompt_logprobs is None:
                continue
            output = RequestOutput(
                request.key[1],
                finish_reason=finish_reason,
                prompt_logprobs=prompt_logprobs,
                preemptions=request.num_preemptions,
            )
            if tokens:
                output.token_ids = tokens
                if finish_reason is FinishReason.STOP and self.scheduler.is_stop_token(request, tokens[-1]):
                    output.stop_token_id = tokens[-1]
                if request in result.logprobs:
                    output.logprobs = result.logprobs[request][: len(tokens)]
                first = request.num_known_tokens == request.num_prompt_tokens + len(tokens)
                if first and request.first_scheduled is not None:
                    output.cached_tokens = request.num_cached_tokens
                    output.queue_s = request.first_scheduled - request.arrival
                    self.stats.prompt_tokens += request.num_prompt_tokens
                    tokens_of_step += request.num_prompt_tokens
            if finish_reason is not None and request.hold is not None:
                output.source = request.hold.source
            if finish_reason is FinishReason.ERROR:
                output.error = Failure(FailureCode.STEP_FAILED)
            outputs.setdefault(request.key[0], []).append(output)
        self.histograms.add_tokens(tokens_of_step)
        for request in finished:
            del self.requests[request.key]
