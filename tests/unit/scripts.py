"""What a fake worker says: scripts, their order of tokens, and how one becomes the outputs of an engine. It imports no torch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.failures import Failure, FailureCode, FinishReason
from engine.kv_transfer.handle import KvSource
from engine.messages import EmbeddingInfo, ModelInfo, RequestOutput, Submit, TokenLogprob

if TYPE_CHECKING:
    from tests.unit.fake_worker import FakeWorker

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
DEFAULT_LENGTH = 6
STEP_FAILED = Failure(FailureCode.STEP_FAILED)
DIMENSIONS = 4


def model_info(**changes: object) -> ModelInfo:
    """The demo model's facts."""
    facts = ModelInfo(
        directory=str(DEMO),
        tokenizer_file=str(DEMO / "tokenizer.json"),
        architecture="LlamaForCausalLM",
        dtype="float32",
        device="cpu",
        vocab_size=1736,
        max_model_len=2048,
        eos_token_ids=[2, 0],
        block_size=16,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_adapter_rank=64,
        sampling_defaults={},
    )
    return msgspec.structs.replace(facts, **changes)


EMBEDDING = model_info(embedding=EmbeddingInfo(DIMENSIONS, None, True, "", False), max_adapter_rank=0)


@dataclass
class Gate:
    """Where sequences stop until the test lets them go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: bool = False
    worker: FakeWorker | None = None
    """Which waits for it."""

    def open(self) -> None:
        """Let everybody through."""
        self.opened = True
        if self.worker is not None:
            self.worker.go_on()


@dataclass(frozen=True)
class Script:
    """What comes of one request.

    `tokens` None: the last few ids of the prompt, and an end token. As in an engine, an end or stop token and
    `max_tokens` end it; where `tokens` are used up before, `finish` does. `per_step` tokens come in one output. After so
    many tokens it fails (`fail_after`, with `failure`), its worker dies (`die_after`, with `last_words` if there are
    any), or it waits (`gate_after`, at `gate`). `logprobs` are those of its tokens; by default -1/8, -2/8, ...
    """

    tokens: list[int] | None = None
    finish: FinishReason = FinishReason.STOP
    per_step: int = 1
    fail_after: int | None = None
    failure: Failure = STEP_FAILED
    die_after: int | None = None
    last_words: str | None = None
    gate_after: int | None = None
    gate: Gate = field(default_factory=Gate)
    logprobs: list[float] | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    def tokens_for(self, submit: Submit) -> list[int]:
        """All that could come."""
        if self.tokens is not None:
            return self.tokens
        if submit.params.ignore_eos:
            prompt = submit.prompt_token_ids
            return [prompt[i % len(prompt)] for i in range(submit.params.max_tokens)]
        return [*[token for token in submit.prompt_token_ids if token > 2][-DEFAULT_LENGTH:], 2]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer  # a worker process has no use for it

    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def ids(text: str) -> list[int]:
    """The demo model's tokens of a text."""
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)


def says(text: str, **fields: Any) -> Script:
    """The script of a sequence that says this and ends."""
    return Script(tokens=[*ids(text), 2], **fields)


def failed(request_id: int, failure: Failure) -> RequestOutput:
    """The output that ends a request with a failure. The only place that knows how the wire carries one."""
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=failure)


def logprob_of(token: int, value: float, asked: int, named: list[int] | None, vocabulary: int) -> TokenLogprob:
    """A token and its `asked` (or `named`) alternatives: itself, the next ids, each half as likely as the one before."""
    if named is not None:
        return TokenLogprob(token, value, 1, [(i, value - 0.5 * n) for n, i in enumerate(named, 1)])
    top = [((token + n) % vocabulary, value - 0.5 * n) for n in range(asked if asked >= 0 else vocabulary)]
    return TokenLogprob(token, value, 1, top)


class Sequence:
    """One Submit and how far its script has come."""

    def __init__(self, submit: Submit, script: Script, vocabulary: int) -> None:
        self.submit, self.script, self.vocabulary = submit, script, vocabulary
        self.tokens, self.done = script.tokens_for(submit), len(submit.generated)

    @property
    def held(self) -> bool:
        """Whether it waits at its gate."""
        held = self.done == self.script.gate_after and not self.script.gate.opened
        if held:
            self.script.gate.reached.set()
        return held

    @property
    def dies(self) -> bool:
        """Whether it ends its worker now."""
        return self.done == self.script.die_after

    def output(self, eos: list[int]) -> RequestOutput:
        """The next step's."""
        script, params, request_id = self.script, self.submit.params, self.submit.request_id
        if self.done == script.fail_after:
            return failed(request_id, script.failure)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        marks = (script.fail_after, script.die_after, script.gate_after)
        most = min([self.done + script.per_step, params.max_tokens, *(m for m in marks if m and m > self.done)])
        output = RequestOutput(request_id, token_ids=[], preemptions=script.preemptions)
        first = self.done
        for token in self.tokens[first:most]:
            self.done += 1
            output.token_ids.append(token)
            if token in ends and self.done > params.min_tokens:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, token
                break
        if output.finish_reason is None and self.done >= params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        elif output.finish_reason is None and self.done == len(self.tokens) and self.done not in marks:
            output.finish_reason = script.finish
        if self.submit.hold and output.finish_reason in (None, FinishReason.LENGTH):
            known = len(self.submit.prompt_token_ids) + first
            output.finish_reason = output.finish_reason or FinishReason.MOVED
            output.source = KvSource("unix:/nowhere", "demo/0", 1, self.submit.hold, known, 16)
        if params.logprobs is not None:
            output.logprobs = [self._logprob(first + n, t) for n, t in enumerate(output.token_ids)]
        if first == 0:
            output.cached_tokens, output.queue_s = script.cached_tokens, 0.0
            if params.prompt_logprobs is not None:
                known = enumerate(self.submit.prompt_token_ids[1:], 1)
                asked = params.prompt_logprobs
                output.prompt_logprobs = [logprob_of(t, -n / 16, asked, None, self.vocabulary) for n, t in known]
        return output

    def _logprob(self, at: int, token: int) -> TokenLogprob:
        params, given = self.submit.params, self.script.logprobs
        value = -(at + 1) / 8 if given is None else given[at]
        return logprob_of(token, value, params.logprobs or 0, params.logprob_token_ids, self.vocabulary)
