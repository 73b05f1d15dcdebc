"""The dialect-independent result: what one engine output adds to a sequence, as text and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.failures import FinishReason
    from engine.messages import TokenLogprob
    from inference.generation.ending import EndCause


@dataclass(slots=True)
class Delta:
    """New text and tokens of sequence `index` of prompt `prompt`.

    `text` may lag behind the tokens: incomplete characters and possible stop strings are held back. `token_texts` is
    the text of each visible token; special tokens are included if the request asked for `token_texts`.
    `finish_reason` is None, STOP (end of sequence, stop token or stop string) or LENGTH. `stop_reason` is the stop
    string or stop token id that ended the sequence, None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    token_texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    ended_by_eos: bool = False
    cause: EndCause | None = None
    """Why the sequence ended, for the log."""
    prompt: int = 0


def joined(deltas: list[Delta]) -> Delta:
    """Join all deltas of one sequence (at least one) into one."""
    last = deltas[-1]
    logprobs = None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or []]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs,
        token_texts=[text for delta in deltas for text in delta.token_texts],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        ended_by_eos=last.ended_by_eos,
        cause=last.cause,
        prompt=last.prompt,
    )


def by_token(delta: Delta) -> list[Delta]:
    """Split a delta into one for each token. It stays whole if its text differs from the texts of its tokens, because text was held
    back for a stop string.
    """
    count = len(delta.token_ids)
    texts = [*delta.token_texts, *[""] * (count - len(delta.token_texts))]
    if count < 2 or len(texts) != count or "".join(texts) != delta.text:
        return [delta]
    logprobs = [None] * count if delta.logprobs is None else [delta.logprobs[i : i + 1] for i in range(count)]
    return [
        *(
            Delta(delta.index, texts[i], [delta.token_ids[i]], logprobs[i], [texts[i]], prompt=delta.prompt)
            for i in range(count - 1)
        ),
        replace(
            delta,
            text=texts[-1],
            token_ids=delta.token_ids[-1:],
            logprobs=logprobs[-1],
            token_texts=delta.token_texts[count - 1 :],
        ),
    ]


@dataclass(slots=True)
class Usage:
    """Token counts of one request; completion tokens are summed over its sequences and include end tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Seconds on the monotonic clock."""

    arrived: float
    submitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    queue_s: float = 0.0
