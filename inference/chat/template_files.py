"""The chat templates among a model's files, by name, from wherever transformers has written them over the years. It
renders nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT, TOOL_USE = "default", "tool_use"
"""The template of most conversations, and the one for those with tools, as transformers' `get_chat_template` chooses.
"""


def template_texts(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The texts by name; raises OSError or ValueError. The newest place comes first: chat_template.jinja with
    additional_chat_templates/NAME.jinja, then `chat_template` of tokenizer_config.json, a text or a list of named ones,
    then chat_template.json, which processors of several inputs have.
    """
    found: dict[str, str] = {}
    processors = directory / "chat_template.json"
    if processors.is_file():
        content = json.loads(processors.read_text())
        found |= _named(content.get("chat_template") if isinstance(content, dict) else None)
    found |= _named(tokenizer_config.get("chat_template"))
    newest = directory / "chat_template.jinja"
    if newest.is_file():
        found[DEFAULT] = newest.read_text()
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text()
    return found


def _named(template: Any) -> dict[str, str]:
    if isinstance(template, str):
        return {DEFAULT: template}
    if isinstance(template, dict):
        return {str(name): text for name, text in template.items() if isinstance(text, str)}
    if not isinstance(template, list):
        return {}
    entries = [entry for entry in template if isinstance(entry, dict)]
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
