"""Charges the tokens of generations to the API keys that asked for them, when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.generation.generation import Observer

if TYPE_CHECKING:
    from engine.failures import FinishReason
    from inference.admission.rates import RateMeter
    from inference.generation.generation import Generation


class Charges(Observer):
    """An observer of generations. Those that fail or are left by their clients are charged for what they got."""

    def __init__(self, rates: RateMeter) -> None:
        self._rates = rates

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """Charge prompt and output; a prompt that was never computed costs nothing."""
        usage = generation.usage
        if usage.completion_tokens:
            self._rates.charge(generation.tenant, usage.prompt_tokens + usage.completion_tokens)
