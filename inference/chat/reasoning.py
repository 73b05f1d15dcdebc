"""Splits reasoning (`<think>`...`</think>`) from content in a growing text."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


def opens_reasoning(prompt_end: str) -> bool:
    """Whether the prompt ends with an opening reasoning tag."""
    return prompt_end.rstrip().endswith(BEGIN)


class ReasoningSplitter:
    """Splits one output into reasoning and content. Reasoning is recognised only at the start."""

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ends inside a reasoning block."""
        self._mark = END if opened else BEGIN
        self._held = ""
        self._done = False

    @property
    def inside(self) -> bool:
        """Whether the output is within the reasoning now."""
        return self._mark == END and not self._done

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that are certain now."""
        if self._done:
            return "", text
        self._held += text
        if self._mark == BEGIN:
            bare = self._held.lstrip()
            if not bare.startswith(BEGIN):
                return ("", "") if BEGIN.startswith(bare) else ("", self._answer())
            self._mark, self._held = END, bare.removeprefix(BEGIN)
        reasoning, end, answer = self._held.partition(END)
        if end:
            self._held = answer
            return reasoning, self._answer()
        keep = next((n for n in range(len(END) - 1, 0, -1) if self._held.endswith(END[:n])), 0)
        cut = len(self._held) - keep
        reasoning, self._held = self._held[:cut], self._held[cut:]
        return reasoning, ""

    def end(self) -> tuple[str, str]:
        """Flush the held-back text at the end."""
        rest, self._held = self._held, ""
        return ("", rest) if self._done or self._mark == BEGIN else (rest, "")

    def _answer(self) -> str:
        self._done = True
        answer, self._held = self._held, ""
        return answer
