"""Splits a model's thoughts, between `<think>` and `</think>`, from its answer, as the text grows."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


def opens_thoughts(prompt_end: str) -> bool:
    """Whether the prompt leaves the model thinking: the template wrote the opening mark itself."""
    return prompt_end.rstrip().endswith(BEGIN)


class ThoughtSplitter:
    """One output's text in; thoughts and answer out. Only what the output begins with counts as thoughts."""

    def __init__(self, thinking: bool) -> None:
        """`thinking`: the prompt opened the thoughts."""
        self._mark = END if thinking else BEGIN
        self._held = ""
        self._done = False

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain now: thoughts and answer."""
        if self._done:
            return "", text
        self._held += text
        if self._mark == BEGIN:
            bare = self._held.lstrip()
            if not bare.startswith(BEGIN):
                return ("", "") if BEGIN.startswith(bare) else ("", self._answer())
            self._mark, self._held = END, bare.removeprefix(BEGIN)
        thoughts, end, answer = self._held.partition(END)
        if end:
            self._held = answer
            return thoughts, self._answer()
        keep = next((n for n in range(len(END) - 1, 0, -1) if self._held.endswith(END[:n])), 0)
        cut = len(self._held) - keep
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return thoughts, ""

    def end(self) -> tuple[str, str]:
        """What was held back, when the output has ended."""
        rest, self._held = self._held, ""
        return ("", rest) if self._done or self._mark == BEGIN else (rest, "")

    def _answer(self) -> str:
        self._done = True
        answer, self._held = self._held, ""
        return answer
