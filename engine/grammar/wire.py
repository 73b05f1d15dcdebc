"""What a worker, its template process and its grammar processes tell each other, in the frames of `engine.messages`.

Masks do not travel: they lie in a table in shared memory, which the grammar process makes as large as it needs. A row
is the mask of one request, a bit per token, lowest bit first; row `FIRST` is the one before any token.
"""

from __future__ import annotations

import msgspec

FIRST = 0


class Load(msgspec.Struct, array_like=True, tag=True):
    """To the template, first: the vocabulary. `vocab_size` is how many logits the model has."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]


class Fork(msgspec.Struct, array_like=True, tag=True):
    """To the template: a process under this number; its socket and the file of its table come beside the bytes."""

    number: int


class Kill(msgspec.Struct, array_like=True, tag=True):
    """To the template: end that process, if it is still there."""

    number: int


class Compile(msgspec.Struct, array_like=True, tag=True):
    """To a grammar process, first: its grammar."""

    kind: str
    text: str


class Compiled(msgspec.Struct, array_like=True, tag=True):
    """The answer: why not, or None and the width of the table, whose row `FIRST` is filled."""

    error: str | None
    row_bytes: int


class Follow(msgspec.Struct, array_like=True, tag=True):
    """To a grammar process: the rows that are free again, and then the tokens that were chosen, by row.

    A row that is new, or was freed, begins at the grammar's start.
    """

    freed: list[int]
    tokens: list[tuple[int, int]]


class Followed(msgspec.Struct, array_like=True, tag=True):
    """The answer: for each row whether nothing may follow, and why it can be followed no further; its mask is there.

    `seconds` is how long all of them took.
    """

    rows: list[tuple[int, bool, str | None]]
    seconds: float


to_template = msgspec.msgpack.Decoder(Load | Fork | Kill)
to_process = msgspec.msgpack.Decoder(Compile | Follow)
from_process = msgspec.msgpack.Decoder(Compiled | Followed)
