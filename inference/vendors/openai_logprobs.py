"""Log-probabilities in OpenAI's chat and completions formats, and in vLLM's format for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.http.offload import SLICE, encoded
from inference.workers.tokenizer import CONTEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import msgspec

    from engine.messages import TokenLogprob
    from inference.workers.tokenizer import ModelTokenizer

FLOOR = -9999.0
"""vLLM's lowest log-probability, since JSON has no infinity."""


class Context(list[int]):
    """The last tokens of a sequence before the one that is rendered next."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        super().__init__(token_ids[-CONTEXT_TOKENS:])

    def add(self, token_id: int) -> None:
        """The sequence goes on with this token."""
        self.append(token_id)
        del self[:-CONTEXT_TOKENS]


class LogprobTexts:
    """Renders the tokens of one request; `as_ids` renders "token_id:N" instead. Each `context` goes on with what is rendered."""

    def __init__(self, tokenizer: ModelTokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def text(self, token_id: int, context: Context) -> str:
        """The token as a string."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text_after(context, token_id)

    def chat(
        self, logprobs: list[TokenLogprob], top: int, context: Context, actual_first: bool = False
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a chat completion, with the `top` most likely tokens of each; `actual_first`: the
        actual token comes first among them, as in vLLM.
        """

        def content() -> Iterator[dict[str, Any]]:
            for t in logprobs:
                shown = (_actual_first(t) if actual_first else t.top)[:top]
                others = [self._entry(i, value, context) for i, value in shown]
                yield {**self._entry(t.token_id, t.logprob, context), "top_logprobs": others}
                context.add(t.token_id)

        return {"content": encoded(content()) if len(logprobs) > SLICE else list(content())}

    def completion(
        self,
        entries: list[tuple[int, TokenLogprob | None]],
        offset: int,
        context: Context,
        before: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion: (token id, logprob or None) per token, texts from `offset` on. The `lists` in
        `before` come first; they begin there.
        """
        if before is None:
            lists = self.lists(entries, offset, context)
        else:
            lists = self.lists(entries, offset + sum(map(len, before["tokens"])), context)
            lists = {name: before[name] + values for name, values in lists.items()}
        many = len(lists["tokens"]) > SLICE
        return {**lists, "top_logprobs": encoded(lists["top_logprobs"])} if many else lists

    def lists(
        self, entries: list[tuple[int, TokenLogprob | None]], offset: int, context: Context
    ) -> dict[str, list[Any]]:
        """The four lists of such logprobs."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, logprob in entries:
            text = self.text(token_id, context)
            lists["text_offset"].append(offset)
            lists["tokens"].append(text)
            offset += len(text)
            lists["token_logprobs"].append(None if logprob is None else floor(logprob.logprob))
            lists["top_logprobs"].append(None if logprob is None else self._top(logprob, context))
            context.add(token_id)
        return lists

    def prompt(self, prompt_token_ids: list[int], logprobs: list[TokenLogprob]) -> msgspec.Raw:
        """`prompt_logprobs` in vLLM's format: null for the first token, then {token id: {logprob, rank,
        decoded_token}}.
        """
        rows: list[dict[str, Any] | None] = [None]
        context = Context(prompt_token_ids[:1])
        for logprob in logprobs:
            row = {str(logprob.token_id): self._ranked(logprob.token_id, logprob.logprob, logprob.rank, context)}
            for rank, (i, value) in enumerate(logprob.top, 1):
                row.setdefault(str(i), self._ranked(i, value, rank, context))
            rows.append(row)
            context.add(logprob.token_id)
        return encoded(rows)

    def _top(self, logprob: TokenLogprob, context: Context) -> dict[str, float]:
        top: dict[str, float] = {}
        for i, value in _actual_first(logprob):  # of tokens with the same text the first counts
            top.setdefault(self.text(i, context), floor(value))
        return top

    def _entry(self, token_id: int, value: float, context: Context) -> dict[str, Any]:
        text = self.text(token_id, context)
        return {"token": text, "logprob": floor(value), "bytes": list(text.encode(errors="replace"))}

    def _ranked(self, token_id: int, value: float, rank: int, context: Context) -> dict[str, Any]:
        text = self._tokenizer.token_text_after(context, token_id)
        return {"logprob": floor(value), "rank": rank, "decoded_token": text}


def _actual_first(logprob: TokenLogprob) -> list[tuple[int, float]]:
    """The actual token, then the most likely others."""
    actual = logprob.token_id
    return [(actual, logprob.logprob), *((i, value) for i, value in logprob.top if i != actual)]


def floor(value: float) -> float:
    """The log-probability, at least FLOOR."""
    return max(value, FLOOR)
