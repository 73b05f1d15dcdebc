"""Structured output: a request's grammar becomes a mask over the vocabulary before each of its tokens.

Compiling and following a client's grammar has no bound on time, memory or stack, so each distinct grammar runs in a
process of its own: `processes` (in the worker) asks `template`, which forks; `serve` is the forked process; `matcher`
is the worker's side of one request. Only `matcher` imports torch.
"""
