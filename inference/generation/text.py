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
    """Searches for stop strings in text that arrives in pieces, and holds back a possible beginning of one.

    The one that is complete first counts; of those that end at the same character the first of the list, as in vLLM. A character
    costs one look-up for each length that a stop string has, however many there are of it: some dialects allow tens of thousands.
    """

    def __init__(self, stop: list[str], include_stop: bool) -> None:
        self._include = include_stop
        self._lengths = sorted({len(s) for s in stop}, reverse=True)
        self._places = {text: place for place, text in reversed(list(enumerate(stop)))}
        self._hold = self._lengths[0] - 1 if stop else 0
        self._pending = ""

    def feed(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string that was found. Without `search` none ends in this text, but one that
        ends later may begin in it.
        """
        if not self._places:
            return text, None
        searched = len(self._pending)
        self._pending += text
        for end in range(searched + 1, len(self._pending) + 1) if search else ():
            for length in self._lengths:
                if length <= end and self._pending[end - length : end] in self._places:
                    found = self._first_ending(end)
                    return self._pending[: end if self._include else end - len(found)], found
        cut = len(self._pending) - self._hold
        if cut <= 0:
            return "", None
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown, None

    def _first_ending(self, end: int) -> str:
        """The first stop string of the list that ends at this character; one does."""
        ending = (self._pending[end - length : end] for length in self._lengths if length <= end)
        return min((text for text in ending if text in self._places), key=self._places.__getitem__)

    def flush(self) -> str:
        """Flush the held-back text at the end."""
        rest, self._pending = self._pending, ""
        return rest
