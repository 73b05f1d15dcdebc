"""The output items of a response, one after the other, and the events that a stream sends about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.openai.responses_tools import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.dialects.openai.responses_tools import ToolNames

Event = tuple[str, dict[str, Any]]
"""The type of an event without `response.`, and its fields."""
Logprobs = list[dict[str, Any]]


class OutputItems:
    """Writes items from pieces of reasoning, of text and of calls; another kind of piece, or another call, ends the item."""

    def __init__(self, request_id: str, names: ToolNames) -> None:
        self.done: list[dict[str, Any]] = []
        self._id, self._names = request_id, names
        self._item: dict[str, Any] | None = None
        self._open = ""
        self._pieces: list[str] = []
        self._logprobs: Logprobs = []

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return not self.done and self._item is None

    @property
    def writes_text(self) -> bool:
        """Whether the open item is a text."""
        return self._open == "text"

    def reasoning(self, piece: str) -> Iterator[Event]:
        """A piece of the reasoning."""
        if self._open != "reasoning":
            yield from self.close()
            yield from self._begin("reasoning", {"type": "reasoning", "id": self._new_id("rs"), "summary": [],
                                                 "content": [], "status": "in_progress"})  # fmt: skip
            yield self._part_event("content_part.added", part={"type": "reasoning_text", "text": ""})
        self._pieces.append(piece)
        yield self._part_event("reasoning_text.delta", delta=piece)

    def text(self, piece: str, logprobs: Logprobs) -> Iterator[Event]:
        """A piece of the text; an empty one begins an empty text."""
        if self._open != "text":
            yield from self.close()
            yield from self._begin("text", {"type": "message", "id": self._new_id("msg"), "role": "assistant",
                                            "status": "in_progress", "content": []})  # fmt: skip
            yield self._part_event("content_part.added", part=_text_part("", []))
        self._pieces.append(piece)
        self._logprobs += logprobs
        if piece:
            yield self._part_event("output_text.delta", delta=piece, logprobs=logprobs)

    def call(self, call_id: str | None, name: str | None, piece: str) -> Iterator[Event]:
        """A piece of a call's arguments; the first one has the name."""
        if name is not None:
            yield from self.close()
            yield from self._begin("call", self._new_call(call_id, name))
        assert self._open == "call", "a piece of a call comes directly after its others"
        self._pieces.append(piece)
        if piece and self._item is not None and self._item["type"] == "function_call":
            yield self._event("function_call_arguments.delta", delta=piece)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the item, if there is one."""
        if self._item is None:
            return
        item, text = {**self._item, "status": status}, "".join(self._pieces)
        if self._open == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            yield self._part_event("reasoning_text.done", text=text)
            yield self._part_event("content_part.done", part=part)
        elif self._open == "text":
            part = _text_part(text, self._logprobs)
            item["content"] = [part]
            yield self._part_event("output_text.done", text=text, logprobs=self._logprobs)
            yield self._part_event("content_part.done", part=part)
        elif item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", arguments=text, name=item["name"])
        else:
            item["input"] = text_of(text)
            del item["status"]  # such an item has none
            yield self._event("custom_tool_call_input.delta", delta=item["input"])
            yield self._event("custom_tool_call_input.done", input=item["input"])
        yield "output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._item, self._open, self._pieces, self._logprobs = None, "", [], []

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[Event]:
        self._item, self._open = item, kind
        yield "output_item.added", {"output_index": len(self.done), "item": item}

    def _new_call(self, call_id: str | None, name: str) -> dict[str, Any]:
        if name in self._names.custom:
            return {"type": "custom_tool_call", "id": f"ctc_{call_id}", "call_id": call_id, **self._names.named(name),
                    "input": ""}  # fmt: skip
        return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, **self._names.named(name),
                "arguments": "", "status": "in_progress"}  # fmt: skip

    def _new_id(self, prefix: str) -> str:
        """Unique also if a response has two texts, with a call between them."""
        return f"{prefix}_{self._id}" + (f"_{len(self.done)}" if len(self.done) > 1 else "")

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return kind, {"item_id": self._item["id"], "output_index": len(self.done), **fields}

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)


def _text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
