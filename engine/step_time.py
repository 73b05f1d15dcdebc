"""Estimates how long a step takes from the steps before it, and bounds the prompts of a step by time.

A step of many prompt tokens stops every sequence that decodes beside it for as long as it runs. How many tokens fit in a time
depends on the machine, the model and the context, so it is learned. No result depends on an estimate: it only divides a prompt
into chunks.
"""

from __future__ import annotations

import math
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DRIFT = 0.03
"""By how much of itself a coefficient may change from step to step. The machine's speed changes with what else runs on it."""
NOISE = 0.1
"""By how much of itself the time of a step varies without any such change."""
SPREAD = 0.2
"""Relative deviation of a step from its estimate, before any has been seen."""
SPREAD_WEIGHT = 0.1
"""Weight of one step in it."""
DEVIATIONS = 2.0
"""A step is planned so that it keeps to its time if it takes so many deviations longer than estimated."""
OWN_PART = 0.92
"""The part of a step's limit that the step itself is planned for; the rest is for passing its tokens on, because readers see both."""
UNKNOWN = 1.0
"""Variance of coefficients of which nothing is known, in seconds squared; uncertainty does not grow beyond it."""
OUTLIER = 4.0
"""An observation counts for at most this multiple of the estimate: one step that the machine slept through says little."""
LEAST_TOKENS = 16
"""The smallest chunk of a longer prompt; a step's first prompt has it in any case, so that it goes on."""
KNOWN_TOKENS = 256
"""Prompt tokens of a step from which the rate of long steps can be told; short ones are mostly the cost of a step itself."""
FIRST_TOKENS = 64
"""A step's prompt tokens while nothing has been learned."""
GROWTH = 4
"""A step has at most so many times the prompt tokens of the largest of late: what is not known to be dear may be. Steps that are all
alike do not tell what a prompt token costs, so that it may be put down to the step itself, and seem to cost nothing.
"""
FADING = 0.9
"""What is left of the largest step's prompt tokens, as the largest of late, after each further step with prompts."""
ROWS, TOKENS, PAIRS = 1e-1, 1e-1, 1e-6
"""Scales of decoding sequences, prompt tokens, and pairs of tokens and keys. What cannot be told apart yet is put down to the larger
number, which prompt tokens mostly are.
"""


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    total: float = sum(map(mul, first, second))
    return total


class Fit:
    """A value as a linear function of features: a Kalman filter whose coefficients drift.

    All coefficients learn from every observation, so that none is kept by what it made the others do. D. Simon, Optimal State
    Estimation, "The discrete-time Kalman filter".
    """

    def __init__(self, size: int) -> None:
        self.known = False
        self._surprise = 1.0
        """(error / three standard deviations) squared, of the last observation."""
        self._values = [0.0] * size
        self._covariance = [[UNKNOWN if i == j else 0.0 for j in range(size)] for i in range(size)]

    def slopes(self, first: int) -> list[float]:
        """What the features from the `first` on cost. Time does not shrink with work: a negative slope is noise, and 0."""
        return [max(value, 0.0) for value in self._values[first:]]

    def value(self, features: Sequence[float]) -> float:
        """The estimate."""
        return max(_dot(self._values, features), 0.0)

    def learn(self, features: Sequence[float], observed: float) -> None:
        """Record an observation."""
        if self.known:
            observed = min(observed, OUTLIER * self.value(features) + 1e-3)
        self.known = True
        covariance, numbers = self._covariance, range(len(features))
        for i in numbers:
            covariance[i][i] += (DRIFT * self._values[i]) ** 2
        gain = [_dot(row, features) for row in covariance]
        error = observed - _dot(self._values, features)
        known, noise = _dot(gain, features), (NOISE * observed) ** 2 + 1e-12
        # Two errors beyond three deviations say that the machine has changed, not the step: what was known is doubted.
        surprise = error * error / (9.0 * (known + noise))
        doubt = max(min(surprise, self._surprise), 1.0)
        self._surprise = surprise
        weight = doubt / (doubt * known + noise)
        for i in numbers:
            self._values[i] += weight * gain[i] * error
        # Joseph's form: the difference of two large numbers would leave negative variances, from which nothing recovers.
        kept = [[(i == j) - weight * gain[i] * features[j] for j in numbers] for i in numbers]
        halves = [[doubt * _dot(row, other) for row in covariance] for other in kept]
        spread = noise * weight * weight
        covariance = [[_dot(kept[i], halves[j]) + spread * gain[i] * gain[j] for j in numbers] for i in numbers]
        scales = [math.sqrt(UNKNOWN / max(covariance[i][i], UNKNOWN)) for i in numbers]
        self._covariance = [[covariance[i][j] * scales[i] * scales[j] for j in numbers] for i in numbers]


class StepTime:
    """The cost of a step: of the step itself, of decoding sequences, and of prompt tokens, which grows with the context
    before them.
    """

    def __init__(self) -> None:
        self._fit = Fit(4)
        self._most_tokens = 0
        self._most_of_late = 0.0
        self._variance = SPREAD**2

    def learn(
        self, elapsed_s: float, num_decoding: int, chunks: Iterable[tuple[int, int]], bounded: bool = True
    ) -> None:
        """Record a step: the sequences that decoded, and the number of tokens of each chunk of a prompt with the number
        of tokens before it. `bounded`: it had a limit, as those have that the margin is for.
        """
        tokens = pairs = 0.0
        for count, start in chunks:
            tokens, pairs = tokens + count, pairs + count * (start + count / 2)
        features = (1.0, num_decoding * ROWS, tokens * TOKENS, pairs * PAIRS)
        if tokens and bounded and self._most_tokens:
            overrun = min(max(elapsed_s / max(self._fit.value(features), 1e-6) - 1.0, 0.0), 1.0)
            self._variance += SPREAD_WEIGHT * (overrun * overrun - self._variance)
        self._most_tokens = max(self._most_tokens, int(tokens))
        if tokens:
            self._most_of_late = max(FADING * self._most_of_late, tokens)
        self._fit.learn(features, elapsed_s)

    @property
    def margin(self) -> float:
        """What a limit is divided by: 1 on a machine whose steps take no longer than estimated, more where others use it too."""
        return 1.0 + DEVIATIONS * math.sqrt(self._variance)

    def decode_s(self, num_decoding: int) -> float:
        """Expected seconds of a step in which so many sequences decode and nothing else runs."""
        return self._fit.value((1.0, num_decoding * ROWS, 0.0, 0.0))

    def prompts_s(self, limit_ms: int, num_decoding: int) -> float:
        """Seconds for the prompts of a step beside so many sequences that decode, so that its tokens come within `limit_ms`."""
        return max(limit_ms / 1e3 * OWN_PART / self.margin - self.decode_s(num_decoding), 0.0)

    def prefill_s(self, count: int, start: int) -> float:
        """Expected seconds that `count` prompt tokens after `start` others add to a step."""
        return _dot(self._fit.slopes(2), (count * TOKENS, count * (start + count / 2) * PAIRS))

    def prefill_rate(self, count: int, num_decoding: int) -> float | None:
        """Expected prompt tokens a second in steps with `count` of them, beside sequences that decode; None while no long step
        has been seen.
        """
        if self._most_tokens < KNOWN_TOKENS:
            return None
        count = min(max(count, LEAST_TOKENS), self._most_tokens)  # an estimate beyond it says little
        seconds = self.decode_s(num_decoding) + self.prefill_s(count, 0)
        return count / seconds if seconds > 0.0 else None

    def fitting(self, seconds: float, start: int) -> int:
        """The number of prompt tokens after `start` others that the next step may have, in `seconds`."""
        if seconds > 0.0 and not self._most_tokens:
            return FIRST_TOKENS
        return int(min(self.taking(seconds, start), self.most_tokens))

    def taking(self, seconds: float, start: int) -> float:
        """The number of prompt tokens after `start` others that are estimated to take `seconds`."""
        if seconds <= 0.0:
            return 0.0
        token_s, pair_s = (c * scale for c, scale in zip(self._fit.slopes(2), (TOKENS, PAIRS), strict=True))
        # Solve pair_s / 2 * n^2 + (token_s + pair_s * start) * n = seconds for n, in a form that also takes pair_s = 0.
        linear = token_s + pair_s * start
        root = linear + math.sqrt(linear * linear + 2.0 * pair_s * seconds)
        return 2.0 * seconds / root if root else math.inf

    @property
    def most_tokens(self) -> int:
        """The most prompt tokens of the next step, whatever they are estimated to take."""
        return max(int(GROWTH * self._most_of_late), FIRST_TOKENS)


class PrefillLimit:
    """The time that one step's prompts may still take. Without a limit every prompt token is granted."""

    def __init__(self, step_time: StepTime, seconds: float) -> None:
        """`seconds` may be infinite."""
        self._step_time, self._left, self._granted = step_time, seconds, False
        self._room = step_time.most_tokens

    @property
    def bounded(self) -> bool:
        """Whether there is a limit."""
        return not math.isinf(self._left)

    @property
    def exhausted(self) -> bool:
        """Whether no further prompt is granted a token."""
        return self._granted and self._left <= 0.0

    def grant(self, count: int, start: int) -> int:
        """How many of a prompt's next `count` tokens, which follow `start` others, may be computed; their time is used. 0 only
        if the limit is exhausted.
        """
        if not self.bounded:
            return count
        if self.exhausted:
            return 0
        granted = min(count, max(min(self._step_time.fitting(self._left, start), self._room), LEAST_TOKENS))
        self._granted = True
        self._left -= self._step_time.prefill_s(granted, start)
        self._room -= granted
        if granted < count or min(self._room, self._step_time.fitting(self._left, 0)) < LEAST_TOKENS:
            self._left = 0.0
        return granted
