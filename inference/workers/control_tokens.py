"""Escapes special tokens in client text, so that only the chat template can write them.

Each special token gets a random alias of the same length, different in every process, and a copy of the tokenizer
knows only the aliases. Client text can therefore never produce a special token; in a rendered template, the names
that the template wrote are replaced by their aliases. While the template is rendered, names in client text are
replaced by stand-ins of the same length, so that the two can be distinguished afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

PRIVATE_FIRST, PRIVATE_COUNT = 0xF0000, 0xFFFE
"""Unicode's private-use plane 15."""
SAMPLE = "One line of text, with 12 numbers;\n and another.\tÉté"


class ControlTokens:
    """The special tokens of one tokenizer.json. `plain` encodes rendered templates with aliases, and client text as
    it is.
    """

    def __init__(self, path: Path, fast: FastTokenizer) -> None:
        """Raises ValueError for a tokenizer whose special tokens cannot be renamed."""
        specials = {token.content: i for i, token in fast.get_added_tokens_decoder().items() if token.special}
        self._secret = {content: _private(len(content)) for content in specials}
        self._stand_in = {content: _private(len(content)) for content in specials}
        self._written = {mark: content for content, mark in self._stand_in.items()}
        self._contents, self._marks = _any_of(specials), _any_of(self._written)
        self.plain = FastTokenizer.from_str(_renamed(json.loads(path.read_text()), self._secret))
        self.plain.no_truncation()
        self.plain.no_padding()
        same = all(self.plain.token_to_id(self._secret[content]) == i for content, i in specials.items())
        if not same or self.plain.encode(SAMPLE).ids != fast.encode(SAMPLE).ids:
            raise ValueError("the tokenizer's special tokens cannot be kept apart from text")

    def escape(self, value: Any, but: frozenset[str] = frozenset()) -> Any:
        """Escape special tokens in all strings of a value, except those in `but`."""
        if isinstance(value, str):
            return self._contents.sub(lambda m: m[0] if m[0] in but else self._stand_in[m[0]], value)
        if isinstance(value, list):
            return [self.escape(item, but) for item in value]
        if isinstance(value, dict):
            return {self.escape(key, but): self.escape(item, but) for key, item in value.items()}
        return value

    def unescape(self, rendered: str) -> str:
        """Undo the escaping of a rendered template."""
        return self._marks.sub(lambda match: self._written[match[0]], rendered)

    def with_aliases(self, rendered: str) -> str:
        """A rendered template with aliases for its special tokens, as `plain` encodes it; same length as `unescape`."""
        return self.unescape(self._contents.sub(lambda match: self._secret[match[0]], rendered))


def _private(length: int) -> str:
    return "".join(chr(PRIVATE_FIRST + secrets.randbelow(PRIVATE_COUNT)) for _ in range(length))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, the longest first; matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _renamed(tokenizer: dict[str, Any], names: dict[str, str]) -> str:
    """tokenizer.json with aliases for these tokens, wherever it refers to them by name only."""
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    else:  # Unigram: pieces with their scores, the index is the id
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(tokenizer)
