"""Every setting, of the server and of the dialects, with values that it cannot have: refused by its name, or taken; never anything else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from config.options import Options
from config.refusals import settings_refused, variable
from inference.dialects import declared_dialects

SECRET = "correct-horse"
NONSENSE = [
    "-1", "99999999999999999999999999", "1e400", "nan", "inf", "abc", "/nonexistent/x", "[", "[1]", '["["]', '{"a": "b"}', '{"a": 1e999}',
    "null", "é", "a\nb", "postgresql://u:correct-horse@h:99999/x", "\udcff",
]  # fmt: skip
CLASSES = [Options, *(dialect.settings for dialect in declared_dialects() if dialect.settings is not None)]
SETTINGS = [(settings, name) for settings in CLASSES for name in settings.model_fields]


def variable_of(settings, name):
    alias = settings.model_fields[name].validation_alias
    return variable(name) if alias is None else alias if isinstance(alias, str) else alias.choices[0]


@pytest.mark.parametrize(("settings", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_nonsense_is_refused_by_the_settings_name_or_taken(settings, name, monkeypatch):
    for value in NONSENSE:
        monkeypatch.setenv(variable_of(settings, name), value)
        try:
            settings()
        except ValidationError as error:
            lines = settings_refused(error)
            assert lines
            assert all(name.removesuffix("_file") in line.lower() or " need" in line for line in lines), lines


@pytest.mark.parametrize(("settings", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_an_empty_variable_is_as_none(settings, name, monkeypatch):
    monkeypatch.delenv(variable_of(settings, name), raising=False)
    before = settings()
    monkeypatch.setenv(variable_of(settings, name), "")
    assert settings() == before


@pytest.mark.parametrize(
    ("settings", "name"),
    [(settings, name) for settings, name in SETTINGS if settings.model_fields[name].annotation is float],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_time_has_an_end(settings, name, monkeypatch):
    """Timers count milliseconds in 32 bits: a server with more had started, and never become ready."""
    monkeypatch.setenv(variable_of(settings, name), "1e300")
    with pytest.raises(ValidationError) as caught:
        settings()
    (line,) = settings_refused(caught.value)
    assert line.startswith(f"DRAGOMAN_{name.upper()}: Input should be less than or equal to ")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("api_keys", SECRET, "a JSON list is expected"),
        ("torchserve_allowed_urls", SECRET, "a JSON list is expected"),
        ("inference_objectives", SECRET, "a JSON object is expected"),
        ("drain_s", "inf", "a finite number"),
        ("secrets_key", SECRET, "32 bytes as url-safe base64"),
        ("torchserve_max_tokens", SECRET, "a valid integer"),
    ],
)
def test_what_is_expected_is_told_and_no_value(name, value, told, monkeypatch):
    settings = next(settings for settings in CLASSES if name in settings.model_fields)
    monkeypatch.setenv(variable_of(settings, name), value)
    with pytest.raises(ValidationError) as caught:
        settings()
    (line,) = settings_refused(caught.value)
    assert line.startswith(f"DRAGOMAN_{name.upper()}: ")
    assert told in line
    assert SECRET not in line
    assert SECRET not in str(caught.value)
