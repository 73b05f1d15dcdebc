"""Incremental decoding of token ids, and the search for stop strings in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 16
"""Prompt tokens decoded before the output, to get leading spaces right."""
HELD_TOKENS = 64
"""Tokens without text that are decoded again with each further one; with so many, what they are is decided."""
CHARACTER_TOKENS = 3
"""Tokens after its first one that a character of UTF-8 may have."""
REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Decodes a growing token sequence; an incomplete character yields "" until it is complete, or clearly never will be."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], skipped: frozenset[int]) -> None:
        """The special tokens in `skipped` have no text: none, or all that the tokenizer has."""
        self._tokenizer, self._skipped = tokenizer, skipped
        self._context = prompt_token_ids[-CONTEXT_TOKENS:]
        """The tokens of the last text: those after it are decoded with them."""
        while self._context and self._decode(self._context).endswith(REPLACEMENT):
            self._context.pop()  # a stream shows a context that is no whole text
        self._held: list[int] = []
        """The tokens since."""
        self._stream = self._new_stream()

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # tokenizers raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that never become a character, and would change the one before them: continue without that.
            self._context, self._held = self._held, []
            self._stream = self._new_stream()
            return self._decode(self._context)
        if text:
            self._context, self._held = self._held, []
            return text
        return "" if len(self._held) < HELD_TOKENS else self._decided()

    def _decided(self) -> str:
        """The text of the held tokens but for the last few, which may begin a character."""
        before, whole = self._decode(self._context), self._decode([*self._context, *self._held])
        if whole == before:  # tokens that have no text
            self._held = []
            self._stream = self._new_stream()
            return ""
        if not whole.startswith(before):
            self._context, before, whole = [], "", self._decode(self._held)
        for cut in range(len(self._held) - CHARACTER_TOKENS, len(self._held) // 2, -1):
            shown, rest = self._decode([*self._context, *self._held[:cut]]), self._held[cut:]
            if shown + self._decode(rest) == whole:
                break  # no character is on both sides
        else:
            shown, rest = whole, []
        self._context, self._held = [], []
        self._stream = self._new_stream()
        return shown.removeprefix(before) + "".join(map(self.step, rest))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=bool(self._skipped))

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=bool(self._skipped))


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
