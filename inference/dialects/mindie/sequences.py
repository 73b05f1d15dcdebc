"""`n` and `best_of`: their ranges, and which combinations an endpoint refuses, in MindIE's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.mindie.errors import invalid

if TYPE_CHECKING:
    from inference.dialects.mindie.fields import Fields
    from inference.dialects.mindie.settings import Capacity, MindieSettings

MAX_BEST_OF, MAX_N = 128, 8192
ASYNC_ON = "while MINDIE_ASYNC_SCHEDULING_ENABLE is on"


def parse_best_of(body: Fields) -> int | None:
    """`best_of`, checked alone."""
    text = f"Parameter [best_of] should be in [1, {MAX_BEST_OF}], got {{}}."
    return body.unsigned("best_of", 1, MAX_BEST_OF, refusal=text)


def parse_n(body: Fields, settings: MindieSettings, capacity: Capacity) -> int | None:
    """`n`, checked alone and against the batch sizes; MindIE ends two of its texts with a space."""
    n = body.unsigned("n", 1, MAX_N, refusal=f"Parameter [n] should be in [1, {MAX_N}], got {{}}. ")
    if n is not None:
        check_batch("n", n, settings, capacity)
    return n


def check_batch(name: str, value: int, settings: MindieSettings, capacity: Capacity) -> None:
    """Refuse more sequences than config.json lets run at once."""
    for key, limit, end in (
        ("max_batch_size", capacity.max_batch_size, " "),
        ("maxPrefillBatchSize", capacity.max_prefill_batch_size, ""),
        ("maxN", settings.max_n, ""),
    ):
        if value > limit:
            raise invalid(
                f"The {name} parameter ({value}) exceeds '{key}' ({limit}). "
                f"Please reduce {name} or increase '{key}' in config.json of mindie-service.{end}"
            )


class Combination:
    """`n` and `best_of` of one request, None if they are not given. The endpoints differ in their texts only."""

    def __init__(self, n: int | None, best_of: int | None, temperature: float | None) -> None:
        self.n, self.best_of = n, best_of
        self._greedy = not temperature

    @property
    def wanted(self) -> int:
        """The number of sequences to generate."""
        return self.best_of if self.best_of is not None else self.n or 1

    @property
    def _too_few(self) -> bool:
        return self.best_of is not None and self.n is not None and self.best_of < self.n

    @property
    def _values(self) -> str:
        return f"best_of is {self.best_of}, n is {self.n}."

    def check_vllm(self) -> None:
        """The rules of vLLM's endpoint, also for streams."""
        if self._too_few:
            raise invalid(f"best_of should greater than or equal to n, but {self._values}")
        if self._greedy and self.wanted > 1:
            raise invalid(
                f"Best_of/N can not greater than 1 when temperature is 0 or not set, but {self._values}"
            )  # fmt: skip

    def check_chat(self, stream: bool) -> None:
        """The rules of chats."""
        if stream and self.best_of is not None and self.best_of != self.n:
            raise invalid(f"best_of must be equal to n in stream mode, but {self._values}")
        if self._too_few:
            raise invalid(f"best_of must be greater than or equal to n, but {self._values}")
        if self._greedy and self.wanted > 1:
            raise invalid(
                "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, "
                f"but {self._values}"
            )

    def check_completions(self, stream: bool) -> None:
        """The rules of completions."""
        if stream and self.best_of is not None and self.n is None:
            raise invalid(f"best_of must be equal to n in stream mode, but {self._values}")
        if stream and self.best_of is not None and self.best_of != self.n:
            raise invalid(f"best_of must be equal to n, but best_of is {self.best_of} and n is {self.n}.")
        if self._too_few:
            raise invalid(
                f"Best_of must be greater than or equal to n, but best_of is {self.best_of} and n is {self.n}."
            )  # fmt: skip
        if self._greedy and self.wanted > 1:
            best_of, n = ("null" if value is None else value for value in (self.best_of, self.n))
            raise invalid(
                "Best_of and n shouldn't be greater than 1 when sampling is disabled, "
                f"but best_of is {best_of} and n is {n}."
            )

    def check_scheduling(self, settings: MindieSettings, beams: bool = False) -> None:
        """Refuse several sequences where the environment says so."""
        if not settings.async_scheduling:
            return
        if beams:
            raise invalid(f"use_beam_search is not supported {ASYNC_ON}")
        # One of the two stands for the other.
        if (self.n or self.best_of or 1) != 1:
            raise invalid(f"n must be 1 {ASYNC_ON}")
        if self.wanted != 1:
            raise invalid(f"best_of must be 1 {ASYNC_ON}")
