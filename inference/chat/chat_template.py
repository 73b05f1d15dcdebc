"""A model's chat template, with the form in which it takes the content of a message: a text, or a list of parts.

Templates of models that read images beside text often loop over parts and print nothing of a content that is a text.
Which form a template takes is seen by rendering one message of ours, before the first conversation.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import jinja2
import structlog

from inference.chat.guarded_template import GuardedTemplate
from inference.chat.template_environment import environment
from inference.chat.template_process import WRONG

if TYPE_CHECKING:
    from concurrent.futures import Executor

logger = structlog.get_logger(__name__)

PROBE = f"q{secrets.token_hex(4)}"
"""A content that no template prints by itself. It differs from process to process, so nobody knows it."""


class ChatTemplate:
    """Renders conversations whose contents are texts, in the form that the template takes."""

    def __init__(self, template: jinja2.Template | GuardedTemplate, special_texts: dict[str, str]) -> None:
        """`special_texts`: the model's special tokens by name. The first rendering tries the form, by up to four more
        of another conversation: with these alone, for what a client sends must not decide for others.
        """
        self._template, self._special_texts = template, special_texts
        self._in_parts: bool | None = None

    @property
    def thread(self) -> Executor | None:
        """Where renderings have to be waited for; None: they may run anywhere."""
        return self._template.thread if isinstance(self._template, GuardedTemplate) else None

    def render(self, values: dict[str, Any]) -> str:
        """The text of `values["messages"]` and the other values by name. Raises one of `WRONG`."""
        if self._in_parts is None:
            self._in_parts = self._takes_parts_alone()
        if self._in_parts:
            values = {**values, "messages": [_in_parts(message) for message in values["messages"]]}
        return self._template.render({**self._special_texts, **values})

    def _takes_parts_alone(self) -> bool:
        conversations = [[{"role": "user", "content": PROBE}]]
        conversations.append([{"role": "system", "content": PROBE}, *conversations[0]])  # some templates insist on one
        for messages in conversations:
            if self._shows(messages):
                return False
            if self._shows([_in_parts(message) for message in messages]):
                return True
        return False

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        values = {**self._special_texts, "messages": messages, "add_generation_prompt": True}
        try:
            return PROBE in self._template.render(values)
        except WRONG:
            return False


def of_model(text: str | None, special_texts: dict[str, str]) -> ChatTemplate | None:
    """A template that came with a model; None without one, or if it cannot be used: such a model still completes
    texts.
    """
    if text is None:
        return None
    try:
        return ChatTemplate(environment().from_string(text), special_texts)
    except jinja2.TemplateSyntaxError as error:
        logger.warning("chat template unusable", reason=str(error))
        return None


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
