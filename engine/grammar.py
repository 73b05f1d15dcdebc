"""Structured output: a request's grammar becomes a mask over the vocabulary before each of its tokens.

llguidance compiles and follows the grammar. Compiling happens on a thread of its own, so a request waits for its
grammar and nobody else does; a grammar that cannot be compiled fails its request alone.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from engine.sampling_params import Grammar

MAX_COMPILED = 64
"""Compiled grammars that are kept for the next request with the same one."""


class GrammarError(Exception):
    """The grammar cannot be compiled; the text says why."""


class Matcher:
    """How far one request has got in its grammar."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, mask_size: int, vocab_size: int) -> None:
        """The mask covers the `mask_size` tokens of the tokenizer, of which the model has `vocab_size`."""
        self._matcher = matcher
        ids = (grammar.think_begin, grammar.think_end)
        if any(token is not None and not 0 <= token < vocab_size for token in ids):
            raise GrammarError("the model has no tokens for thoughts")
        self._think_begin, self._think_end = ids
        self._thinking = grammar.thinking
        self._mask = allocate_token_bitmask(1, mask_size)
        self._vocab_size = vocab_size

    def forbidden(self) -> torch.Tensor:
        """[V] bool: the tokens that may not come next."""
        if self._thinking:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        fill_next_token_bitmask(self._matcher, self._mask, 0)
        allowed = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little", count=self._vocab_size)
        forbidden = torch.from_numpy(allowed) == 0
        if self._think_begin is not None:
            forbidden[self._think_begin] = False
        return forbidden

    def advance(self, token: int) -> None:
        """A token was chosen."""
        if self._thinking:
            self._thinking = token != self._think_end
        elif token == self._think_begin:
            self._thinking = True
        else:
            self._matcher.consume_token(token)
        self._think_begin = None  # thoughts come first or not at all

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    @property
    def error(self) -> str | None:
        """Why the grammar can be followed no further."""
        return str(self._matcher.get_error())[:500] if self._matcher.is_error() else None


class GrammarCompiler:
    """Grammars of one model's vocabulary."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer_file, self._vocab_size, self._eos = tokenizer_file, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar-compiler")

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """A matcher of the request's own, or GrammarError, later."""
        return self._thread.submit(self._compile, grammar)

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load_tokenizer(self) -> LLTokenizer:
        """A tokenizer may know more tokens than the model has logits, or fewer."""
        text = self._tokenizer_file.read_text()
        known = max(Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values()) + 1
        eos = [token for token in self._eos if token < known]
        return LLTokenizer(text, n_vocab=max(known, self._vocab_size), eos_token=eos or None)

    def _compile(self, grammar: Grammar) -> Matcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        source = (grammar.kind, grammar.text)
        if source not in self._compiled:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
            if matcher.is_error():
                raise GrammarError(str(matcher.get_error())[:500])
            self._compiled[source] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        size: int = self._tokenizer.vocab_size
        return Matcher(self._compiled[source].deep_copy(), grammar, size, self._vocab_size)


def _source(grammar: Grammar) -> Any:
    """The grammar in llguidance's own form; raises GrammarError."""
    try:
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind == "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if grammar.kind == "structural_tag":
            tags = [
                StructTag(trigger=tag["trigger"], begin=tag["begin"], grammar=tag["schema"], end=tag["end"])
                for tag in json.loads(grammar.text)
            ]
            return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))
        text = gbnf_to_lark(grammar.text) if "::=" in grammar.text else grammar.text
        return LLMatcher.grammar_from_lark(text)
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise GrammarError(f"{error}"[:500]) from error
