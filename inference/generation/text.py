"""Incremental decoding of token ids, and the search for stop strings in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 16
"""Prompt tokens decoded before the output, to get leading spaces right."""


class IncrementalDecoder:
    """Decodes a growing token sequence; an incomplete character yields "" until it is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = DecodeStream(ids=prompt_token_ids[-CONTEXT_TOKENS:], skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # tokenizers raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            # A byte sequence that never becomes a character: continue after it.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id) or ""


class StopStrings:
    """Searches for stop strings in text that arrives in pieces, and holds back a possible beginning of one."""

    def __init__(self, stop: list[str], include_stop: bool) -> None:
        self._stop, self._include = stop, include_stop
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string that was found."""
        if not self._stop:
            return text, None
        self._pending += text
        hits = [(at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        if hits:
            at, found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            return self._pending[: at + (len(found) if self._include else 0)], found
        cut = len(self._pending) - self._hold
        if cut <= 0:
            return "", None
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown, None

    def flush(self) -> str:
        """Flush the held-back text at the end."""
        rest, self._pending = self._pending, ""
        return rest
