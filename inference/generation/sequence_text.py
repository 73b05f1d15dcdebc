"""Turns the token ids of one sequence into Deltas: decodes, searches for stop strings, sets the finish reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.failures import FinishReason
from inference.generation.deltas import Delta
from inference.generation.ending import EndCause
from inference.generation.text import IncrementalDecoder, StopStrings

if TYPE_CHECKING:
    from engine.messages import RequestOutput
    from inference.generation.requests import GenerationRequest
    from inference.workers.target import Target


class SequenceText:
    """The text of one sequence. Keeps its tokens and holds back text that may still change."""

    def __init__(
        self, request: GenerationRequest, target: Target, prompt_token_ids: list[int], min_tokens: int, index: int
    ) -> None:
        """A stop string counts from where a token after the first `min_tokens` completes it; it may begin before."""
        tokenizer = target.tokenizer
        self._request, self._index, self._min_tokens = request, index, min_tokens
        skip = request.skip_special_tokens and not request.token_texts
        skipped = tokenizer.special_ids if skip else frozenset()
        self._decoder = IncrementalDecoder(tokenizer.fast, prompt_token_ids, skipped)
        self._stops = StopStrings(request.stop, request.include_stop)
        self._eos = target.info.eos_token_ids
        self.token_ids: list[int] = []
        """The tokens so far."""

    def render(self, output: RequestOutput, cancelled: EndCause | None) -> Delta:
        """The Delta of one engine output, which may hold several tokens if the reader lagged.

        A sequence that was `cancelled` ends as after a stop string.
        """
        delta = Delta(self._index, "", [], prompt=self._request.number)
        shown: list[str] = []
        for position, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            delta.token_ids.append(token)
            ends = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if ends and not self._request.include_stop:
                break  # the token that ends the text is not part of it
            text = self._decoder.step(token)
            delta.token_texts.append(text)
            # A stop string that is the end token's own text does not come before the token.
            text, found = self._stops.feed(text, search=not ends and len(self.token_ids) > self._min_tokens)
            shown.append(text)
            if found is not None:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, found
                delta.cause = EndCause.STOP_STRING
                break
        if delta.finish_reason is None and output.finish_reason is not None:
            shown.append(self._stops.flush())
            self._end(delta, output, cancelled)
        delta.text = "".join(shown)
        if output.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
        return delta

    def _end(self, delta: Delta, output: RequestOutput, cancelled: EndCause | None) -> None:
        """Handle the end of the sequence in the engine."""
        aborted = cancelled is not None and output.finish_reason == FinishReason.ABORT
        delta.finish_reason = FinishReason.STOP if aborted else output.finish_reason
        if output.stop_token_id is not None:
            delta.ended_by_eos = output.stop_token_id in self._eos
            delta.stop_reason = None if delta.ended_by_eos else output.stop_token_id
            delta.cause = EndCause.END_OF_SEQUENCE if delta.ended_by_eos else EndCause.STOP_TOKEN
        elif delta.finish_reason == FinishReason.LENGTH:
            delta.cause = EndCause.LENGTH
        elif aborted:
            delta.cause = cancelled
        else:  # a complete grammar ends the text as an end token would
            delta.ended_by_eos, delta.cause = cancelled is None, EndCause.GRAMMAR_COMPLETE
