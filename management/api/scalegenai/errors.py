"""Refusals of the API, with the status and body that the vendor's clients read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Location = tuple[str | int, ...]
"""Names and list indexes from the body to a field."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field. `kind` is a code in pydantic's style; `text` names the allowed range."""

    location: Location
    text: str
    kind: str = "value_error"
    place: str = "body"
    """Where the field is: `body`, `query` or `path`."""
    against: tuple[Location, ...] = ()
    """The other fields that it contradicts."""

    @property
    def name(self) -> str:
        """The vendor's dotted name: `autoscaling_config.scale_to_zero`, `llm_loras[0].hf_repo`."""
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.location)
        return "".join(parts).removeprefix(".") or self.place

    @property
    def detail(self) -> dict[str, Any]:
        """The error as an entry of `detail`."""
        return {"loc": [self.place, *self.location], "msg": self.text, "type": self.kind}


class ApiError(Exception):
    """A refusal: a status, a message without secrets and paths of this machine, and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"success": False, "message": str(self)}


class InvalidFields(ApiError):
    """422: fields are wrong. `errors` holds all of them."""

    def __init__(self, errors: Iterable[FieldError]) -> None:
        self.errors = tuple(errors)
        super().__init__(422, "; ".join(f"{error.name}: {error.text}" for error in self.errors))

    @property
    def body(self) -> dict[str, Any]:
        return {
            "success": False,
            "message": [f"{error.name}: {error.text}" for error in self.errors],
            "detail": [error.detail for error in self.errors],
        }


def not_found(public_id: str) -> ApiError:
    """404 for an unknown deployment."""
    return ApiError(404, f"there is no deployment with the id {public_id[:64]}")
