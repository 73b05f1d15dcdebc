"""A parsed request of any of MindIE's endpoints, and what the engine is asked for. It renders nothing."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from inference.generation.beam_search import check_beams
from inference.generation.requests import GenerationRequest, GrammarRequest, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.chat.tools import Choice, Tools
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.parameters import Sampling
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.answer import Reply
    from inference.generation.generation import Generation
    from inference.workers.target import Target

LAST_PRIORITY = 5
SEED_BITS = 32
"""The width of a seed that the server chooses, as in MindIE: a client may send it back, so it must be in `seed`'s range."""


class MessageType(IntEnum):
    """The endpoint of a request, by the numbers that MindIE's instances tell each other."""

    TGI = 1
    GENERAL_TGI = 2
    """POST /."""
    VLLM = 3
    OPENAI = 4
    VLLM_OPENAI = 5
    VLLM_OPENAI_COMP = 6
    INFER = 8
    TRITON = 9
    TRITON_TOKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How an answer is written: what an instance that goes on with a request must know besides the tokens."""

    kind: MessageType
    stream: bool = False
    request_id: str = ""
    """As the answer shows it, if it does."""
    model: str = ""
    """As the answer shows it, if it does."""
    text: str = ""
    """The prompt's text, where an answer may repeat it."""
    details: bool = False
    full_text: bool = False
    prefill: bool = False
    statistics: bool = False
    output: str = ""
    """The name of the output tensor."""
    tools: Tools = None
    choice: Choice = None
    logprobs: int | None = None
    returned: int = 1
    """The number of sequences in a completion."""
    response_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed request."""

    target: Target
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    form: Form
    make_reply: Callable[[Form, MindieSettings, Generation, Clock], Reply]
    sequences: int = 1
    logprobs: int | None = None
    truncate: int | None = None
    grammar: GrammarRequest | None = None
    names: set[str] = field(default_factory=set)
    """Additional ids under which the request can be stopped."""
    timeout_s: int | None = None
    priority: int | None = None
    """1 (highest) to 5 (lowest, the default and the priority of other dialects' requests)."""
    end: bytes = b""
    beams: bool = False
    generated: list[int] = field(default_factory=list)
    """Tokens that it got from an earlier instance."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""
        return self.form.stream


def generation_request(request: InferenceRequest, state: MindieState) -> GenerationRequest:
    """What the engine is asked for; raises InvalidRequest for beams with other parameters."""
    capacity, settings, sampling = state.capacity(request.target), state.settings, request.sampling
    longest = capacity.max_input_token_len
    left, right = request.truncate, None
    if settings.truncation == 1:
        left = min(left or longest, longest)
    elif settings.truncation == -1:
        right = longest
    logprobs = request.logprobs
    if logprobs is None and request.sequences > 1:
        logprobs = 0  # choices are sorted by it
    wanted = capacity.max_iter_times if request.max_tokens is None else request.max_tokens
    adapter = request.target.adapter
    internal = GenerationRequest(
        steps=True,
        model=request.target.entry.name if adapter is None else f"{request.target.entry.name}:{adapter.name}",
        prompt=request.prompt,
        sampling=sampling.overrides(request.sequences, request.target.info.vocab_size, logprobs),
        grammar=request.grammar,
        max_tokens=min(wanted, capacity.max_iter_times),
        seed=secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed,
        n=request.sequences,
        stop=sampling.stop,
        include_stop=sampling.include_stop,
        skip_special_tokens=sampling.skip_special_tokens,
        truncate_left=left,
        truncate_right=right,
        max_prompt_tokens=longest,
        use_model_defaults=False,
        priority=(request.priority or LAST_PRIORITY) - LAST_PRIORITY,
        beams=request.beams,
        longest_s=settings.e2e_timeout_s,
        generated=request.generated,
    )
    if request.beams:
        check_beams(internal)
    return internal
