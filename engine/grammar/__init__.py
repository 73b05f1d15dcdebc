"""Structured output: a request's grammar becomes a mask over the vocabulary before each of its tokens.

A grammar is a client's program, and llguidance may take any time, memory or depth of stack for it. So every grammar runs
in a process of its own: `processes` (in the worker) asks `template` for one, which forks itself; `serve` is what that
process does; `matcher` is the worker's side of one request. Nothing here imports torch but `matcher`.
"""
