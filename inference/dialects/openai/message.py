"""The assistant's message of one choice, split into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING, Any

from inference.chat.answer_parser import AnswerParser
from inference.chat.tools import named_tool

if TYPE_CHECKING:
    from inference.chat.tool_calls import CallPart
    from inference.dialects.openai.schema import ChatCompletionRequest
    from inference.generation.generation import Generation

ALPHANUMERIC = string.ascii_letters + string.digits


class Message:
    """Builds the deltas and the final message of one choice."""

    def __init__(self, body: ChatCompletionRequest, generation: Generation) -> None:
        tokenizer = generation.target.tokenizer
        self._parser = AnswerParser(
            tokenizer,
            generation.prompt_token_ids,
            body.tools,
            body.tool_choice,
            whole=not body.stream,
        )
        self._named = named_tool(body.tool_choice)
        self._show_reasoning = body.include_reasoning is not False
        self._most_calls = 1 if body.parallel_tool_calls is False else None
        self._style = tokenizer.tool_style
        self.reasons = False
        """Whether the last piece of text was reasoning or a mark of it, also if it is not shown or adds nothing yet."""
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def hides_tokens(self) -> bool:
        """Whether the client must not see single tokens, for some may be reasoning that it does not want."""
        return not self._show_reasoning and self._parser.may_reason

    def delta(self, text: str, ended: bool) -> dict[str, Any]:
        """The delta for this text; empty while undecided. Its content and its calls are apart, as in a chat's message."""
        delta: dict[str, Any] = {}
        for piece in self.pieces(text, ended):
            for key, value in piece.items():
                delta[key] = delta[key] + value if key in delta else value
        return delta

    def pieces(self, text: str, ended: bool) -> list[dict[str, Any]]:
        """What this text adds, in the model's order: deltas of reasoning, of content or of one call each."""
        if self._parser.plain:
            self._content.append(text)
            return [{"content": text}]
        added = self._parser.feed(text, ended)
        self.reasons = added.reasons
        pieces: list[dict[str, Any]] = []
        if added.reasoning and self._show_reasoning:
            self._thoughts.append(added.reasoning)
            pieces.append({"reasoning": added.reasoning, "reasoning_content": added.reasoning})
        for part in added.parts:
            if isinstance(part, str):
                self._content.append(part)
                pieces.append({"content": part})
            elif (call := self._call(part)) is not None:
                pieces.append({"tool_calls": [call]})
        return pieces

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls so far."""
        return self._calls

    def whole(self, before: str) -> dict[str, Any]:
        """The final message; `before` is the text that it continues."""
        content, reasoning = before + "".join(self._content), self.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None, "annotations": None, "audio": None, "function_call": None,
            "reasoning": reasoning or None,
        }  # fmt: skip
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason: "tool_calls" if the model chose to call a tool, "stop" if `tool_choice` forced it."""
        return "tool_calls" if reason == "stop" and self._calls and self._named is None else reason

    def _call(self, part: CallPart) -> dict[str, Any] | None:
        """The delta of a tool call's piece; None for a call after the first if parallel calls are not allowed."""
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
        """Mistral's templates accept only ids of nine letters and digits."""
        if self._style == "mistral":
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return f"chatcmpl-tool-{secrets.token_hex(16)}"
