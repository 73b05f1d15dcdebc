"""Every message between a client and an engine worker, and how it is framed. Imports msgspec and nothing heavier.

A frame is a little-endian unsigned 32-bit length and that many bytes of msgpack. A connection starts with the
client's `Hello`; the worker answers with `Ready` or `Refused`. The second element of these three is the protocol version, in this
version and all others. EOF means death on either side.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.adapters.failures import AdapterFailure
from engine.failures import Failure, FinishReason
from engine.kv_transfer.handle import KvSource
from engine.kv_transfer.messages import Fetch, KvStats, Pull, Release
from engine.offload.stats import OffloadStats
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOL_VERSION = 12
MAX_FRAME_BYTES = 256 << 20
MAX_GREETING_BYTES = 1 << 10
"""The longest frame that a worker takes before its client's `Hello`."""
_LENGTH = struct.Struct("<I")


class ProtocolError(Exception):
    """The peer sent bytes that are not a frame of this protocol."""


MALFORMED = (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a peer's bytes raises; msgspec tells of text that is no UTF-8 by an exception that is not its own."""


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """One token's log-probability; `rank` is 1 for the most likely; `top` lists (token id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class EmbeddingInfo(msgspec.Struct, array_like=True):
    """Facts about an embedding model.

    `prompt` is put before every text; `lower_case`: texts are lower-cased first. `truncations`: the lengths that
    embeddings may be cut to (None: any). `normalise`: whether the model normalises by default.
    """

    dimensions: int
    truncations: list[int] | None
    normalise: bool
    prompt: str
    lower_case: bool


class ModelInfo(msgspec.Struct, array_like=True):
    """Facts about the model of a worker. `directory`: its config and tokenizer files, on the worker's host."""

    directory: str
    tokenizer_file: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_adapter_rank: int
    """0 if the model takes no adapters."""
    sampling_defaults: dict[str, float]
    """temperature, top_k, top_p, min_p, repetition_penalty as far as generation_config.json sets them."""
    embedding: EmbeddingInfo | None = None
    """Set if the worker makes embeddings; such a worker generates no text."""


class Hello(msgspec.Struct, array_like=True, tag=True):
    """A client's first frame: its protocol version, and the worker id and epoch that it expects."""

    protocol: int
    worker_id: str
    epoch: int


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """An adapter: the digest of its content (`engine.adapters.files.digest_of`) and its directory on
    the worker's host.
    """

    digest: str
    directory: str


class Tenant(msgspec.Struct, array_like=True, frozen=True):
    """Whose request it is: the public prefix of an API key ("" without keys), the flow that a client or a gateway names within
    it, and the key's weight, above 0.
    """

    key: str = ""
    flow: str = ""
    weight: float = 1.0

    @property
    def holder(self) -> tuple[str, str]:
        """Who holds a share of a queue: the key; only without keys the flow, for a client may name as many as it likes."""
        return (self.key, "") if self.key else ("", self.flow)


NOBODY = Tenant()


class Submit(msgspec.Struct, array_like=True, tag=True):
    """One sequence to generate. `request_id` is unique within the connection; `timeout_s` counts from arrival.

    Requests of a greater `band` are served first; between tenants, and by `priority` within one, the scheduling policy decides.

    `cache_salt` separates tenants in the prefix cache: equal prompts share blocks only under equal salts.
    `generated` are the output tokens that the sequence got from another worker. It goes on as if this worker had made
    them: only later tokens are sent, no log-probabilities of the prompt, and neither `cached_tokens` nor `queue_s`. Such a sequence
    waits as if it had come `age_s` seconds ago, when its client asked for it.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    adapter: AdapterRef | None = None
    generated: list[int] = []
    tenant: Tenant = Tenant()
    band: int = 0
    hold: str = ""
    source: KvSource | None = None
    age_s: float = 0.0


class Embed(msgspec.Struct, array_like=True, tag=True):
    """A request for the embeddings of texts, given as token ids. The vectors are cut to `dimensions` (None: not cut),
    then scaled to length 1 if `normalise`.
    """

    request_id: int
    inputs: list[list[int]]
    dimensions: int | None
    normalise: bool
    timeout_s: float | None = None
    tenant: Tenant = NOBODY


class AdapterCommand(msgspec.Struct, array_like=True, tag=True):
    """Load an adapter ahead of requests, pin or unpin it, or unload it."""

    call_id: int
    action: Literal["load", "pin", "unpin", "unload"]
    adapter: AdapterRef


class Abort(msgspec.Struct, array_like=True, tag=True):
    """Cancel these requests, waiting or running. Unknown ids are ignored."""

    request_ids: list[int]


class Alive(msgspec.Struct, array_like=True, tag=True):
    """Sent once a second by a client on another host, whose end may vanish without a word."""


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The worker's answer to `Hello`."""

    protocol: int
    worker_id: str
    epoch: int
    model: ModelInfo


class Refused(msgspec.Struct, array_like=True, tag=True):
    """The worker's answer to a `Hello` it does not accept (other protocol, other worker, stale epoch): what it is itself."""

    protocol: int
    worker_id: str
    epoch: int


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """The output of one step for one request.

    `finish_reason` is None while it runs; `error` says why it is ERROR.
    `stop_token_id` is set when an end-of-sequence or stop token ended it; that token is the last of `token_ids`.
    `logprobs` is as long as `token_ids` when asked for; `prompt_logprobs` arrives in prompt order, in pieces.
    `cached_tokens` and `queue_s` come with the first output; the times are seconds.
    `embeddings` answers `Embed`: the vectors one after the other, little-endian float32.
    `source` comes with the end of a sequence that was to be held (`Submit.hold`), unless its text has ended. Its finish reason is MOVED, or
    LENGTH if it has all its tokens.
    """

    request_id: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    preemptions: int = 0
    error: Failure | None = None
    embeddings: bytes | None = None
    source: KvSource | None = None


class Stats(msgspec.Struct, array_like=True, gc=False):
    """The engine's gauges, and counters since its start."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    adapters: list[str] = []
    """Digests of the adapters in slots."""
    failed_adapters: dict[str, AdapterFailure] = {}
    """The adapters that could not be loaded when they were last needed, by digest."""
    offload: OffloadStats | None = None
    """None: no KV offload."""
    kv: KvStats | None = None
    """None before the first transfer."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_S = tuple(0.0001 * 1.5**k for k in range(1, 36))
STEP_REQUESTS = tuple(2**k for k in range(11))
DRAFTED = (0, 1, 2, 3, 4, 6, 8, 12, 16)


class StepHistograms(msgspec.Struct, array_like=True, gc=False):
    """Histograms of the steps since the worker's start: counts per bucket (the last is +Inf).

    `tokens`, over the buckets `STEP_TOKENS`: a step's generated tokens, and the prompts of the requests whose first
    token it generated; `tokens_sum` is their sum. `prefill_s` and `decode_s`, over the buckets `STEP_S`: seconds of
    steps with and without prompt tokens. `publish_prefill_s` and `publish_decode_s`: seconds in which such a step's results were
    recorded and published, after it. `prompts`, over the buckets `STEP_REQUESTS`: the requests of a step that computed their
    prompts, in steps with any; `mixed` steps had requests that generate besides. `drafted`, over the buckets `DRAFTED`:
    draft tokens that a request kept in a step.
    """

    tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    tokens_sum: int = 0
    prefill_s: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_S) + 1))
    decode_s: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_S) + 1))
    failed: int = 0
    publish_prefill_s: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_S) + 1))
    publish_decode_s: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_S) + 1))
    publish_prefill_sum_s: float = 0.0
    publish_decode_sum_s: float = 0.0
    prompts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_REQUESTS) + 1))
    prompts_sum: int = 0
    mixed: int = 0
    drafted: list[int] = msgspec.field(default_factory=lambda: [0] * (len(DRAFTED) + 1))
    drafted_sum: int = 0

    def add_step(self, elapsed_s: float, requests: int, prompts: int) -> None:
        """Record the duration of one step of so many `requests`, of which `prompts` computed their prompts."""
        (self.prefill_s if prompts else self.decode_s)[bisect_left(STEP_S, elapsed_s)] += 1
        if prompts:
            self.prompts[bisect_left(STEP_REQUESTS, prompts)] += 1
            self.prompts_sum += prompts
            self.mixed += prompts < requests

    def add_publishing(self, elapsed_s: float, is_decode: bool) -> None:
        """Record how long the results of one step took after it."""
        bucket = bisect_left(STEP_S, elapsed_s)
        if is_decode:
            self.publish_decode_s[bucket] += 1
            self.publish_decode_sum_s += elapsed_s
        else:
            self.publish_prefill_s[bucket] += 1
            self.publish_prefill_sum_s += elapsed_s

    def add_drafted(self, tokens: Iterable[list[int]]) -> None:
        """Record the draft tokens among the tokens that each request got in one step."""
        for kept in tokens:
            if kept:
                self.drafted[bisect_left(DRAFTED, len(kept) - 1)] += 1
                self.drafted_sum += len(kept) - 1

    def add_tokens(self, tokens: int) -> None:
        """Record the tokens of one step: generated tokens, and the prompts of requests with their first token."""
        if tokens:
            self.tokens[bisect_left(STEP_TOKENS, tokens)] += 1
            self.tokens_sum += tokens


class Outputs(msgspec.Struct, array_like=True, tag=True):
    """The outputs of one step for one client. `histograms` is set when the engine becomes idle."""

    outputs: list[RequestOutput]
    stats: Stats
    histograms: StepHistograms | None = None


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Sent about once a second, also during long steps. A client that misses heartbeats takes the worker for hung or
    suspended.
    """

    stats: Stats
    draining: bool
    histograms: StepHistograms | None = None


class Reply(msgspec.Struct, array_like=True, tag=True):
    """The answer to a command: None if it succeeded (a load: when the adapter has been read), else the reason."""

    call_id: int
    error: AdapterFailure | None


class Dead(msgspec.Struct, array_like=True, tag=True):
    """The worker is about to exit, for this reason."""

    reason: str


ToWorker = Hello | Submit | Embed | Abort | AdapterCommand | Alive | Fetch | Release | Pull
ToClient = Ready | Refused | Outputs | Heartbeat | Reply | Dead

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_client = msgspec.msgpack.Decoder(ToClient)
_elements = msgspec.msgpack.Decoder(list[msgspec.Raw])
_integer = msgspec.msgpack.Decoder(int)


def version_of(greeting: bytes) -> int:
    """The protocol version of the peer that sent this first frame; raises one of MALFORMED if it names none."""
    elements = _elements.decode(greeting)
    if len(elements) < 2:
        raise ProtocolError("the first frame names no version")
    return _integer.decode(elements[1])


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message, length included."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes | bytearray, limit: int = MAX_FRAME_BYTES) -> int:
    """The body length in the four bytes that start a frame; raises ProtocolError when it is over the limit."""
    length: int = _LENGTH.unpack_from(head)[0]
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


class FrameBuffer:
    """Collects received bytes and gives back whole frame bodies."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        """The longest body; may be changed."""
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with `data`; raises ProtocolError on an impossible length."""
        self._data += data
        bodies, start = [], 0
        while len(self._data) - start >= 4:
            end = start + 4 + frame_length(self._data[start : start + 4], self.limit)
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[start + 4 : end]))
            start = end
        del self._data[:start]
        return bodies
