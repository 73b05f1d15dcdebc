"""Variables that look like settings of this server and are none, mostly misspelt ones."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from config.options import Options
from config.refusals import PREFIX
from inference.dialects import declared_dialects

if TYPE_CHECKING:
    from collections.abc import Mapping


def unknown_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The names of such variables, each with the setting that was probably meant; "" if none is like it."""
    known = {f"{PREFIX}{name.upper()}" for name in Options.model_fields}
    for dialect in declared_dialects():
        if dialect.settings is not None:
            known |= {f"{PREFIX}{name.upper()}" for name in dialect.settings.model_fields}
    unknown = sorted(name for name in set(environment) - known if name.startswith(PREFIX))
    return {name: next(iter(get_close_matches(name, known, 1)), "") for name in unknown}
