"""The engine core of an embedding model: lists of texts in, vectors out. Each step computes some texts of each request, and of each
tenant in proportion to its weight.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.embedding.model import load_embedding_model
from engine.engine import ClientOutputs, EngineBroken, refused
from engine.failures import Failure, FailureCode, FinishReason
from engine.messages import (
    AdapterCommand,
    Embed,
    EmbeddingInfo,
    ModelInfo,
    RequestOutput,
    Stats,
    StepHistograms,
    Submit,
)
from engine.policies.fair import Times
from engine.process.cpus import FairShare, usable_cpus
from engine.process.flight import StepRecord, recorder
from engine.process.progress import Pace, progress
from engine.queue_limits import SHARE

if TYPE_CHECKING:
    from engine.config import EngineConfig

logger = logging.getLogger(__name__)

LIKE_A_REQUEST_TOKENS = 16


@dataclass(slots=True, eq=False)
class _Job:
    """One request, and the vectors of its texts so far."""

    key: tuple[int, int]
    message: Embed
    deadline: float | None
    next_input: int = 0
    dropped: FinishReason | None = None
    """ABORT or MOVED: the next step drops the request with this reason."""
    vectors: list[torch.Tensor] = field(default_factory=list)


class EmbeddingCore:
    """One embedding model and its requests; an `engine.engine.Engine`. Not thread-safe: one loop owns it."""

    blocked = False
    """Requests wait for nothing but their turn."""
    transfers = None

    def __init__(self, config: EngineConfig) -> None:
        """Load the model; raises ModelError if it cannot be served."""
        threads = config.threads or usable_cpus()
        torch.set_num_threads(threads)
        self._share = FairShare(threads)
        self.config, self.model = config, load_embedding_model(config)
        self.jobs: dict[tuple[int, int], _Job] = {}
        self.queues: dict[str, deque[_Job]] = {}
        """Of each tenant, requests with texts that are not computed yet, the next one first."""
        self._times = Times()
        self.stats, self.failed_steps = Stats(), 0
        self.histograms = StepHistograms()
        self._pace = Pace(1)
        begin = time.monotonic()
        self.model.embed([[0] * min(LIKE_A_REQUEST_TOKENS, self.model.max_model_len)])
        self._pace.learn(LIKE_A_REQUEST_TOKENS, time.monotonic() - begin)
        model = self.model
        self.info = ModelInfo(
            directory=str(model.directory),
            tokenizer_file=str(model.tokenizer_file),
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu",
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=[],
            block_size=config.block_size,
            num_blocks=0,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_adapter_rank=0,
            sampling_defaults={},
            embedding=EmbeddingInfo(
                model.dimensions, model.truncations, model.pooling.normalise, model.pooling.prompt, model.pooling.lower_case
            ),
        )  # fmt: skip

    def submit(self, client: int, message: Submit | Embed) -> RequestOutput | None:
        """Queue a client's request. Returns its only output if it is refused, else None."""
        if isinstance(message, Submit):
            return refused(message, Failure(FailureCode.GENERATES_NO_TEXT))
        key = (client, message.request_id)
        failure = Failure(FailureCode.REQUEST_ID_IN_USE) if key in self.jobs else self._refusal(message)
        if failure is not None:
            return refused(message, failure)
        job = _Job(key, message, None if message.timeout_s is None else time.monotonic() + message.timeout_s)
        self.jobs[key] = job
        name = message.tenant.key
        if name not in self.queues:
            self.queues[name] = deque()
            self._times.enter(name)
        self.queues[name].append(job)
        return None

    def command(self, message: AdapterCommand) -> AdapterFailure | None:
        """Refuse: embedding models take no adapters."""
        return AdapterFailure(AdapterCode.NO_ADAPTERS)

    def loading(self, digest: str) -> bool:
        """Always False."""
        return False

    def load_failure(self, digest: str) -> AdapterFailure | None:
        """Always None."""
        return None

    def abort(self, client: int, request_ids: list[int]) -> None:
        """Mark requests for removal at the next step."""
        for request_id in request_ids:
            job = self.jobs.get((client, request_id))
            if job is not None:
                job.dropped = FinishReason.ABORT

    def abort_client(self, client: int) -> None:
        """Mark all requests of a disconnected client for removal at the next step."""
        self.abort(client, [request_id for owner, request_id in self.jobs if owner == client])

    def hand_over(self) -> None:
        """Mark all requests as moved; the next step ends them."""
        for job in self.jobs.values():
            job.dropped = job.dropped or FinishReason.MOVED

    @property
    def has_work(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self.jobs)

    def step(self) -> ClientOutputs:
        """Embed one batch. A request is answered when all its texts are embedded."""
        outputs: ClientOutputs = {}
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if job.dropped is not None:
                self._end(job, outputs, RequestOutput(job.key[1], finish_reason=job.dropped))
            elif job.deadline is not None and job.deadline <= now:
                late = RequestOutput(job.key[1], finish_reason=FinishReason.TIMEOUT)
                self._end(job, outputs, late if job.next_input else refused(job.message, Failure(FailureCode.TOO_LATE)))
        batch = self._next_batch()
        if not batch:
            return outputs
        tokens = sum(len(job.message.inputs[index]) for job, index in batch)
        progress.begin("computing a step", self._pace.expected_s(tokens))
        torch.set_num_threads(self._share.begin())
        stats = self.refresh_stats()
        record = StepRecord(now, len(batch), tokens, 0, stats.running, stats.waiting, 0, 0)
        recorder.add(record)
        try:
            vectors = self.model.embed([job.message.inputs[index] for job, index in batch])
        except Exception:  # an outer boundary: the batch fails, the engine goes on
            self.failed_steps += 1
            record.failed = True
            logger.exception("step failed", extra={"texts": len(batch)})
            for job in {id(job): job for job, _ in batch}.values():
                self._end(job, outputs, refused(job.message, Failure(FailureCode.STEP_FAILED)))
            return outputs
        self._share.end()
        self.failed_steps = 0
        elapsed = record.elapsed_s = time.monotonic() - now
        self._pace.learn(tokens, elapsed)
        self._count(tokens, len(batch), elapsed)
        for (job, _), vector in zip(batch, vectors, strict=True):
            job.vectors.append(vector)
            if len(job.vectors) == len(job.message.inputs):
                record.finished += 1
                done = RequestOutput(job.key[1], finish_reason=FinishReason.STOP, embeddings=_bytes(job))
                self._end(job, outputs, done)
        return outputs

    def check_integrity(self) -> None:
        """Called when idle; raises EngineBroken if a request is still known."""
        if self.jobs or self.queues:
            raise EngineBroken(f"idle with {len(self.jobs)} requests, of {len(self.queues)} tenants")

    def close(self) -> None:
        """Do nothing: this core starts no threads and no processes."""

    def refresh_stats(self) -> Stats:
        """The counters, with the gauges updated."""
        started = sum(bool(job.next_input) for job in self.jobs.values())
        self.stats.running, self.stats.waiting = started, len(self.jobs) - started
        return self.stats

    def _refusal(self, message: Embed) -> Failure | None:
        most, holder = self.config.max_waiting_requests, message.tenant.holder
        own = sum(job.message.tenant.holder == holder for job in self.jobs.values())
        if own < len(self.jobs) and own + 1 > max(1, int(most * SHARE)):
            return Failure(FailureCode.OVER_SHARE)
        if len(self.jobs) >= most:
            return Failure(FailureCode.OVERLOADED)
        if not message.inputs or not all(message.inputs):
            return Failure(FailureCode.EMPTY_INPUT)
        if max(map(len, message.inputs)) > self.model.max_model_len:
            return Failure(FailureCode.INPUT_TOO_LONG, {"limit": self.model.max_model_len})
        if any(min(ids) < 0 or max(ids) >= self.model.vocab_size for ids in message.inputs):
            return Failure(FailureCode.OUT_OF_VOCABULARY, {"highest": self.model.vocab_size - 1})
        return None

    def _next_batch(self) -> list[tuple[_Job, int]]:
        """The texts of the next batch as (request, index): up to the token budget, at least one. The tenant that got the fewest tokens
        for its weight is next, and of one tenant the requests are in turn, so that none waits for a long list.
        """
        batch: list[tuple[_Job, int]] = []
        served: set[str] = set()
        budget = self.config.max_num_batched_tokens
        while self.queues and len(batch) < self.config.max_num_seqs:
            name = min(self.queues, key=self._times.of)
            job = self.queues[name][0]
            size = len(job.message.inputs[job.next_input])
            if batch and size > budget:
                break
            budget -= size
            self._take(job)
            batch.append((job, job.next_input))
            job.next_input += 1
            self._times.charge(name, size / job.message.tenant.weight)
            served.add(name)
            if job.next_input < len(job.message.inputs):
                self.queues.setdefault(name, deque()).append(job)
        if served:
            self._times.advance(served)
        return batch

    def _take(self, job: _Job) -> None:
        """Take the request out of its tenant's queue."""
        name = job.message.tenant.key
        self.queues[name].remove(job)
        if not self.queues[name]:
            del self.queues[name]

    def _count(self, tokens: int, texts: int, elapsed: float) -> None:
        self.stats.steps += 1
        self.stats.prefill_steps += 1
        self.stats.prefill_s += elapsed
        self.histograms.add_step(elapsed, texts, texts)
        self.stats.prompt_tokens += tokens

    def _end(self, job: _Job, outputs: ClientOutputs, output: RequestOutput) -> None:
        del self.jobs[job.key]
        if job.next_input < len(job.message.inputs):
            self._take(job)
        outputs.setdefault(job.key[0], []).append(output)


def _bytes(job: _Job) -> bytes:
    """The request's vectors, cut and normalised as it asks: rows of little-endian float32."""
    vectors = torch.stack(job.vectors)[:, : job.message.dimensions]
    if job.message.normalise:
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    packed: bytes = vectors.numpy().astype("<f4").tobytes()
    return packed
