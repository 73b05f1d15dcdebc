"""How settings are read from the environment: the base class of the server's settings and of a dialect's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


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

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller gives, then the environment."""
        return init_settings, _Variables(settings_cls)


class _Variables(EnvSettingsSource):
    """Variables of the environment. A text that is no JSON is left to the field, which refuses it by its name."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value
