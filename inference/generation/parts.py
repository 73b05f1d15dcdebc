"""Parts of a sequence whose other part another server has: its first token, and all after that."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from engine.failures import FinishReason
from inference.generation.ending import EndCause
from inference.generation.generation import Generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.kv_transfer.handle import KvSource
    from engine.messages import RequestOutput
    from engine.sampling.params import SamplingParams
    from inference.generation.deltas import Delta
    from inference.workers.routing.assignment import Assignment
    from inference.workers.target import Target


class FirstToken(Generation):
    """Ends with one more token. Its last delta has no finish reason if the sequence can go on elsewhere."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self._limit()

    async def _encode_for(self, target: Target) -> None:
        await super()._encode_for(target)
        self._limit()

    def _limit(self) -> None:
        """Ask the engine for one token only."""
        tokens = len(self.request.generated) + 1
        self._can_go_on = self.params.max_tokens > tokens
        self.params = msgspec.structs.replace(self.params, max_tokens=min(tokens, self.params.max_tokens))

    async def _outputs(
        self,
        assignment: Assignment,
        token_ids: list[int],
        params: SamplingParams,
        generated: list[int],
        source: KvSource | None = None,
        hold: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs, without an end that is only this part's."""
        async with aclosing(super()._outputs(assignment, token_ids, params, generated, source, hold)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.LENGTH and self._can_go_on:
                    self._ends_early = True
                    output = msgspec.structs.replace(output, finish_reason=None)
                yield output

    def _note_tokens(self, delta: Delta) -> None:
        super()._note_tokens(delta)
        if self._ends_early and delta.finish_reason is None:
            self.finish = FinishReason.LENGTH
            self.ending.all(EndCause.HANDED_OVER)


class Continued(Generation):
    """Goes on after the tokens that another server has made, with that one's blocks if they can be had."""

    async def _outputs(
        self,
        assignment: Assignment,
        token_ids: list[int],
        params: SamplingParams,
        generated: list[int],
        source: KvSource | None = None,
        hold: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs; the first worker is told where the blocks are."""
        if generated == self.request.generated:
            source = source or self.request.source
        async with aclosing(super()._outputs(assignment, token_ids, params, generated, source, hold)) as outputs:
            async for output in outputs:
                yield output
