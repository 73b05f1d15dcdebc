"""A model's chat template, with the form in which it takes the content of a message: a text, or a list of parts.

Templates of models that read images beside text often loop over parts and print nothing of a content that is a text. Which
form a template takes is seen by rendering one message, before the first conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jinja2
import structlog

from inference.chat.guarded_template import GuardedTemplate
from inference.chat.template_environment import environment
from inference.chat.template_process import WRONG

if TYPE_CHECKING:
    from concurrent.futures import Executor

logger = structlog.get_logger(__name__)

PROBE = "qzw7xk"
"""A content that no template prints by itself."""


class ChatTemplate:
    """Renders conversations whose contents are texts. One that clients of the control plane wrote is `guarded`."""

    def __init__(self, template: jinja2.Template | GuardedTemplate) -> None:
        self._template = template
        self._in_parts: bool | None = None

    @property
    def thread(self) -> Executor | None:
        """Where renderings have to be waited for; None: they may run anywhere."""
        return self._template.thread if isinstance(self._template, GuardedTemplate) else None

    def render(self, values: dict[str, Any]) -> str:
        """The text of `values["messages"]` and the other values by name. Raises one of `WRONG`."""
        if self._in_parts is None:
            self._in_parts = self._takes_parts_alone(values)
        if self._in_parts:
            values = {**values, "messages": [_in_parts(message) for message in values["messages"]]}
        return self._template.render(values)

    def _takes_parts_alone(self, values: dict[str, Any]) -> bool:
        conversations = [[{"role": "user", "content": PROBE}]]
        conversations.append([{"role": "system", "content": PROBE}, *conversations[0]])  # some templates insist on one
        for messages in conversations:
            if self._shows(values, messages):
                return False
            if self._shows(values, [_in_parts(message) for message in messages]):
                return True
        return False

    def _shows(self, values: dict[str, Any], messages: list[dict[str, Any]]) -> bool:
        try:
            return PROBE in self._template.render({**values, "messages": messages})
        except WRONG:
            return False


def of_model(text: str | None) -> ChatTemplate | None:
    """A template that came with a model; None without one, or if it cannot be used: such a model still completes texts."""
    if text is None:
        return None
    try:
        return ChatTemplate(environment().from_string(text))
    except jinja2.TemplateSyntaxError as error:
        logger.warning("chat template unusable", reason=str(error))
        return None


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
