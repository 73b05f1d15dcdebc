"""Reads body fields with MindIE's type rules and error texts; the first invalid field is reported."""

from __future__ import annotations

from typing import Any

from inference.dialects.mindie.errors import invalid

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
FLOAT32_MAX = 3.4028234663852886e38
MAX_TIMEOUT_S = 65535


class Fields:
    """One object of a body. Absent and null fields are equivalent; unknown ones are ignored."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def get(self, key: str) -> Any:
        """The raw value."""
        return self.values.get(key)

    def boolean(self, key: str) -> bool | None:
        """A boolean."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"{key} must be boolean type.")
        return value

    def number(
        self, key: str, low: float, high: float, *, refusal: str, open_low: bool = False, open_high: bool = False
    ) -> float | None:  # fmt: skip
        """A number within the interval; `refusal` is the error text, with `{}` for the value."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{key} must be float type.")
        outside = value < low or value > high or (open_low and value == low) or (open_high and value == high)
        if outside:
            raise invalid(refusal.format(value))
        return float(value)

    def integer(
        self, key: str, low: int, high: int = INT32_MAX, *, refusal: str = "", kind: str = "integer"
    ) -> int | None:  # fmt: skip
        """An integer within the bounds, both inclusive; `refusal` as for a number, the usual one by default."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or (kind == "unsigned" and value < 0):
            raise invalid(f"{key} must be {kind} type.")
        if not low <= value <= high:
            raise invalid((refusal or f"Parameter {key} must be in [{low},{high}], got {{}}.").format(value))
        return value

    def positive(self, key: str) -> int | None:
        """A 32-bit integer greater than 0."""
        return self.integer(key, 1, refusal=f"Parameter {key} must be in (0,{INT32_MAX}], got {{}}.")

    def unsigned(self, key: str, low: int, high: int, *, refusal: str = "") -> int | None:
        """Like `integer`, but a negative number is a type error."""
        return self.integer(key, low, high, refusal=refusal, kind="unsigned")

    def string(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{key} must be string type.")
        return value

    def object(self, key: str) -> Fields:
        """A nested object; an empty one if it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{key} must be object type.")
        return Fields(value or {})

    # Parameters that several endpoints share, with the ranges that they have there.

    def positive_temperature(self) -> float | None:
        """The temperature of TGI, Triton and native endpoints: greater than 0."""
        return self.number("temperature", 0.0, FLOAT32_MAX, open_low=True, refusal=_temperature_text(FLOAT32_MAX))

    def temperature(self, high: float = FLOAT32_MAX) -> float | None:
        """The temperature of vLLM and OpenAI endpoints: 0 is allowed, although the error text says otherwise."""
        return self.number("temperature", 0.0, high, refusal=_temperature_text(high))

    def top_k(self, low: int) -> int | None:
        """From `low`, which is 0, 1, or -1; -1 stands for 0, and then 0 is refused. The error text is the same for all."""
        refusal = f"Parameter top_k must be in -1 || (0,{INT32_MAX}], got {{}}"
        value = self.integer("top_k", low, refusal=refusal)
        if low < 0 and value == 0:
            raise invalid(refusal.format(value))
        return value

    def top_p(self, open_high: bool) -> float | None:
        """Up to 1 inclusive, except for TGI and native endpoints; the error text is the same for all."""
        text = "Parameter top_p must be in (0.0,1.0], got {}."
        return self.number("top_p", 0.0, 1.0, open_low=True, open_high=open_high, refusal=text)

    def typical_p(self) -> float | None:
        """Accepted, without effect."""
        text = "Parameter typical_p must be in (0.0,1.0], got {}."
        return self.number("typical_p", 0.0, 1.0, open_low=True, refusal=text)

    def seed(self) -> int | None:
        """0 to 2^63 - 1."""
        return self.unsigned("seed", 0, INT64_MAX, refusal=f"Parameter seed must be in [0, {INT64_MAX}], got {{}}.")

    def repetition_penalty(self, high: float = FLOAT32_MAX) -> float | None:
        """Greater than 0."""
        text = f"Parameter 'repetition_penalty' must be in (0.0, {high:g}], got {{}}."
        return self.number("repetition_penalty", 0.0, high, open_low=True, refusal=text)

    def frequency_penalty(self) -> float | None:
        """-2 to 2."""
        text = "Parameter frequency_penalty should be in [-2.0, 2.0], got {}."
        return self.number("frequency_penalty", -2.0, 2.0, refusal=text)

    def presence_penalty(self) -> float | None:
        """-2 to 2."""
        text = "Parameter presence_penalty not in [-2.0, 2.0], but got {}."
        return self.number("presence_penalty", -2.0, 2.0, refusal=text)

    def max_tokens(self) -> int | None:
        """The output's length, of vLLM and OpenAI endpoints."""
        value = self.values.get("max_tokens")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise invalid("Parameter max_tokens not number_integer")
        return self.integer("max_tokens", 1, refusal=f"Parameter max_tokens must be (0,{INT32_MAX}], got {{}}")

    def priority(self) -> int | None:
        """Priority 1 (highest) to 5 (lowest)."""
        return self.unsigned("priority", 1, 5)

    def timeout_s(self) -> int | None:
        """Seconds from one token to the next."""
        text = f"Parameter timeout must be strictly positive and small than {MAX_TIMEOUT_S} seconds, got {{}}."
        return self.unsigned("timeout", 1, MAX_TIMEOUT_S, refusal=text)


def _temperature_text(high: float) -> str:
    return f"Parameter temperature must be in (0.0,{high:g}], got {{}}."
