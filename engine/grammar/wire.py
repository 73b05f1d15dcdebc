"""Messages between a worker, its template process and its grammar processes, framed as in `engine.messages`.

Masks are not sent: they are in a table in shared memory, whose size the grammar process sets. A row is the mask of one
request, one bit per token, lowest bit first; row `FIRST` is the mask before any token.
"""

from __future__ import annotations

import msgspec

FIRST = 0


class Load(msgspec.Struct, array_like=True, tag=True):
    """The first message to the template: the vocabulary. `vocab_size`: the model's number of logits."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]


class Fork(msgspec.Struct, array_like=True, tag=True):
    """To the template: fork a process with this number. Its socket and its table's file are passed with the message."""

    number: int


class Kill(msgspec.Struct, array_like=True, tag=True):
    """To the template: end that process if it still runs."""

    number: int


class Compile(msgspec.Struct, array_like=True, tag=True):
    """The first message to a grammar process: its grammar."""

    kind: str
    text: str


class Compiled(msgspec.Struct, array_like=True, tag=True):
    """The answer to `Compile`: the error, or None when row `FIRST` is filled; `row_bytes`: the width of the table."""

    error: str | None
    row_bytes: int


class Follow(msgspec.Struct, array_like=True, tag=True):
    """To a grammar process: the rows that were freed, and the next tokens by row: the sampled one, or all that a
    replayed sequence has.

    A new or freed row begins at the grammar's start.
    """

    freed: list[int]
    tokens: list[tuple[int, list[int]]]


class Followed(msgspec.Struct, array_like=True, tag=True):
    """The answer to `Follow`, sent when the masks are in the table: for each row (row, whether no further token is
    allowed, the error or None).

    `seconds`: the time that these masks took together.
    """

    rows: list[tuple[int, bool, str | None]]
    seconds: float


to_template = msgspec.msgpack.Decoder(Load | Fork | Kill)
to_process = msgspec.msgpack.Decoder(Compile | Follow)
from_process = msgspec.msgpack.Decoder(Compiled | Followed)
