"""Parses an assistant's output incrementally into reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.chat.call_styles import MACHINES, listed, only_arguments
from inference.chat.reasoning import ReasoningSplitter
from inference.chat.tool_calls import CallPart, Part, ToolCallParser
from inference.chat.tools import may_call, named_tool, tool_names

if TYPE_CHECKING:
    from inference.chat.tools import Choice, Tools
    from inference.workers.tokenizer import ModelTokenizer


@dataclass(slots=True)
class AnswerPart:
    """What one piece of text added: reasoning, then texts and pieces of calls in the model's order. Both are empty while undecided.
    `reasons`: the piece begins or ends within the reasoning.
    """

    reasoning: str
    parts: list[Part]
    reasons: bool = False

    @property
    def content(self) -> str:
        """The text beside the calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPart]:
        """The pieces of calls."""
        return [part for part in self.parts if isinstance(part, CallPart)]


class AnswerParser:
    """Parses one output."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompt_token_ids: list[int],
        tools: Tools,
        choice: Choice,
        whole: bool = False,
    ) -> None:
        """`whole`: the answer is not streamed, so a call may be taken back until it has ended."""
        self._splitter: ReasoningSplitter | None = None
        self._parser: ToolCallParser | None = None
        if tokenizer.may_reason:
            self._splitter = ReasoningSplitter(tokenizer.leaves_reasoning_open(prompt_token_ids))
        if may_call(tools, choice):
            machine, named = MACHINES[tokenizer.tool_style], named_tool(choice)
            if named is not None:
                machine = only_arguments(named)
            elif choice == "required":
                machine = listed
            self._parser = ToolCallParser(machine, tool_names(tools), whole)

    @property
    def may_reason(self) -> bool:
        """Whether part of the text may be reasoning."""
        return self._splitter is not None

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._splitter is None and self._parser is None

    def feed(self, text: str, ended: bool) -> AnswerPart:
        """The parts that are certain now; everything left when the output has `ended`."""
        began_inside = self._splitter is not None and self._splitter.inside
        reasoning, answer = self._split(text, ended)
        reasons = began_inside or (self._splitter is not None and self._splitter.inside) or bool(reasoning)
        parts: list[Part] = [answer] if answer else []
        if self._parser is not None:
            parts = self._parser.feed(answer) + (self._parser.end() if ended else [])
        return AnswerPart(reasoning, parts, reasons)

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        if self._splitter is None:
            return "", text
        reasoning, answer = self._splitter.feed(text)
        if ended:
            last_reasoning, last_answer = self._splitter.end()
            reasoning, answer = reasoning + last_reasoning, answer + last_answer
        return reasoning, answer
