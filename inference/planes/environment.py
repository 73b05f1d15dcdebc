"""How settings are read from the environment: the base class of the server's settings and of a dialect's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
"""How an address begins, also in a path, which has one of its slashes."""


def _no_address(value: str) -> str:
    if ADDRESS.match(value):
        raise ValueError("a directory or a hub id is expected, not an address")
    return value


ModelSource = Annotated[str, AfterValidator(_no_address)]
"""A directory or a hub id."""


class EnvironmentSettings(BaseSettings):
    """Each field is read from DRAGOMAN_<NAME> and checked at startup; an empty variable counts as none.

    Every mistake is pydantic's ValidationError, which has the setting's name and not its value.
    """

    model_config = SettingsConfigDict(
        env_prefix="DRAGOMAN_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_no_addresses(cls, value: Any, info: ValidationInfo) -> Any:
        """Refused here, because what reads a file shows its path, and an address may have a password."""
        if _has_paths(cls.model_fields[str(info.field_name)].annotation):
            for each in value if isinstance(value, list) else [value]:
                if ADDRESS.match(str(each)):
                    raise ValueError("a path is expected, not an address")
        return value

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller gives, then the environment."""
        return init_settings, _Variables(settings_cls)


def _has_paths(annotation: Any) -> bool:
    return annotation is Path or any(map(_has_paths, get_args(annotation)))


class _Variables(EnvSettingsSource):
    """Variables of the environment. A text that is no JSON is left to the field, which refuses it by its name."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value
