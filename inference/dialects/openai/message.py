"""The assistant's message of one choice as it grows: thoughts, content and tool calls told apart."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING, Any

from inference.dialects.openai.tools import may_call, named_tool
from inference.reasoning import ThoughtSplitter
from inference.tool_calls import MACHINES, CallPart, Part, ToolCallParser, listed, only_arguments

if TYPE_CHECKING:
    from inference.dialects.openai.schema import ChatCompletionRequest
    from inference.generate import Generation

ALPHANUMERIC = string.ascii_letters + string.digits


class Message:
    """One choice's text in; the keys of a delta, and of the whole message, out."""

    def __init__(self, body: ChatCompletionRequest, generation: Generation) -> None:
        tokenizer = generation.target.tokenizer
        self._splitter: ThoughtSplitter | None = None
        self._parser: ToolCallParser | None = None
        self._named = named_tool(body)
        self._show_thoughts = body.include_reasoning is not False
        self._most_calls = 1 if body.parallel_tool_calls is False else None
        self._style = tokenizer.tool_style
        if tokenizer.thinks:
            self._splitter = ThoughtSplitter(tokenizer.leaves_thinking(generation.prompt_token_ids))
        if may_call(body):
            machine = MACHINES[self._style]
            if self._named is not None:
                machine = only_arguments(self._named)
            elif body.tool_choice == "required":
                machine = listed
            self._parser = ToolCallParser(machine)
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def delta(self, text: str, ended: bool) -> dict[str, Any]:
        """What this text brings, in a delta's keys; empty where nothing is certain yet."""
        if self._splitter is None and self._parser is None:
            self._content.append(text)
            return {"content": text}
        thoughts, answer = self._split(text, ended)
        parts: list[Part] = [answer] if answer else []
        if self._parser is not None:
            parts = self._parser.feed(answer) + (self._parser.end() if ended else [])
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [entry for part in parts if isinstance(part, CallPart) and (entry := self._call(part)) is not None]
        delta: dict[str, Any] = {}
        if thoughts and self._show_thoughts:
            self._thoughts.append(thoughts)
            delta["reasoning"] = delta["reasoning_content"] = thoughts
        if content:
            self._content.append(content)
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return delta

    def whole(self, before: str) -> dict[str, Any]:
        """The message when it has ended; `before` is text that it continues."""
        content, thoughts = before + "".join(self._content), "".join(self._thoughts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None, "annotations": None, "audio": None, "function_call": None,
            "reasoning": thoughts or None,
        }  # fmt: skip
        if thoughts:
            message["reasoning_content"] = thoughts
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """How the choice ended: in "tool_calls" where the model chose to call something, in "stop" if it had to."""
        return "tool_calls" if reason == "stop" and self._calls and self._named is None else reason

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        if self._splitter is None:
            return "", text
        thoughts, answer = self._splitter.feed(text)
        if ended:
            last_thoughts, last_answer = self._splitter.end()
            thoughts, answer = thoughts + last_thoughts, answer + last_answer
        return thoughts, answer

    def _call(self, part: CallPart) -> dict[str, Any] | None:
        """A call's piece as a delta's entry; None for a call that may not be made beside the first."""
        if self._most_calls is not None and part.index >= self._most_calls:
            return None
        if part.name is None:
            self._calls[part.index]["function"]["arguments"] += part.arguments
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        call = {"id": self._new_id(), "type": "function", "function": function}
        self._calls.append(call)
        return {"index": part.index, **call, "function": dict(function)}

    def _new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits alone."""
        if self._style == "mistral":
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return f"chatcmpl-tool-{secrets.token_hex(16)}"
