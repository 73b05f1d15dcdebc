"""Write the tables of engine options in docs/configuration.md, from the engine's own list.

python -m tools.docs.options_table
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.config import OPTIONS, OptionField

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- Written by `python -m tools.docs.options_table`. -->\n", "<!-- To here. -->\n"


def values(field: OptionField) -> str:
    """What may stand there."""
    if field.choices:
        return ", ".join(f"`{name}`" for name in field.choices)
    if field.type is bool:
        return "`true`, `false`"
    if field.option.minimum is None:
        return "a number"
    return f"{field.option.minimum} to {field.option.maximum}"


def table(settings: bool) -> str:
    """The options with settings, under their settings' names, or the others."""
    lines = [f"| {'setting' if settings else 'option'} | default | values | meaning |", "| --- | --- | --- | --- |"]
    for field in OPTIONS.values():
        if field.option.setting == settings:
            name = field.name.upper() if settings else field.name
            default = str(field.default).lower() if field.type is bool else field.default
            lines.append(f"| `{name}` | {default} | {values(field)} | {field.option.description} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with both tables as they should be."""
    tables = iter((table(True), table(False)))
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    return place.sub(lambda _: BEGIN + next(tables) + END, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
