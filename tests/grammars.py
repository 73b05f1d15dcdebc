"""What a grammar admits, by the library that the engine follows it with."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from engine.grammar.source import source
from engine.sampling.params import Grammar


def admits(grammar: Grammar, text: str) -> bool:
    """Whether the text follows the grammar to its end."""
    tokenizer = LLTokenizer("byte")
    matcher, tokens = LLMatcher(tokenizer, source(grammar.kind, grammar.text)), tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
