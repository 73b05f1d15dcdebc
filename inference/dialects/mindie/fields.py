"""Reads body fields with MindIE's type rules and error texts; the first invalid field is reported."""

from __future__ import annotations

from typing import Any

from inference.dialects.mindie.errors import invalid

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
FLOAT32_MAX = 3.4028234663852886e38


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
        self, key: str, low: float, high: float = FLOAT32_MAX, *, open_low: bool = False, open_high: bool = False,
        interval_text: str | None = None
    ) -> float | None:  # fmt: skip
        """A number within the interval; `interval_text` is its form in the error text."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{key} must be float type.")
        outside = value < low or value > high or (open_low and value == low) or (open_high and value == high)
        if outside:
            interval = f"{'(' if open_low else '['}{low},{high}{')' if open_high else ']'}"
            raise invalid(f"Parameter {key} must be in {interval_text or interval}, got {value}.")
        return float(value)

    def integer(self, key: str, low: int, high: int = INT32_MAX, *, kind: str = "integer") -> int | None:
        """An integer within the bounds, both inclusive."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or (kind == "unsigned" and value < 0):
            raise invalid(f"{key} must be {kind} type.")
        if not low <= value <= high:
            raise invalid(f"Parameter {key} must be in [{low},{high}], got {value}.")
        return value

    def unsigned(self, key: str, low: int, high: int) -> int | None:
        """Like `integer`, but a negative number is a type error."""
        return self.integer(key, low, high, kind="unsigned")

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
        return self.number("temperature", 0.0, open_low=True, interval_text=f"(0.0,{FLOAT32_MAX}]")

    def temperature(self, high: float = FLOAT32_MAX) -> float | None:
        """The temperature of vLLM and OpenAI endpoints: 0 is allowed, although the error text says otherwise."""
        return self.number("temperature", 0.0, high, interval_text=f"(0.0,{high}]")

    def top_p(self, open_high: bool) -> float | None:
        """Up to 1 inclusive, except for TGI and native endpoints; the error text is the same for all."""
        return self.number("top_p", 0.0, 1.0, open_low=True, open_high=open_high, interval_text="(0.0,1.0]")

    def typical_p(self) -> float | None:
        """Accepted, without effect."""
        return self.number("typical_p", 0.0, 1.0, open_low=True)

    def seed(self) -> int | None:
        """0 to 2^63 - 1."""
        return self.unsigned("seed", 0, INT64_MAX)

    def repetition_penalty(self, high: float = FLOAT32_MAX) -> float | None:
        """Greater than 0."""
        return self.number("repetition_penalty", 0.0, high, open_low=True)

    def penalty(self, key: str) -> float | None:
        """`presence_penalty` and `frequency_penalty`."""
        return self.number(key, -2.0, 2.0)

    def minus_one_top_k(self) -> int | None:
        """The top_k of vLLM endpoints: -1 or absent disables it, 0 is refused."""
        value = self.integer("top_k", -1)
        if value == 0:
            raise invalid(f"Parameter top_k must be -1 or in [1,{INT32_MAX}], got 0.")
        return value

    def priority(self) -> int | None:
        """Priority 1 (highest) to 5 (lowest)."""
        return self.unsigned("priority", 1, 5)

    def timeout_s(self) -> int | None:
        """Seconds from one token to the next."""
        return self.unsigned("timeout", 1, 65535)
