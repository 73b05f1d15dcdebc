"""A model's tokenizer and chat template, loaded from its files. It knows no dialect and runs no model code."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from inference.chat import reasoning
from inference.chat.call_styles import TAGS, Style, style_of
from inference.chat.chat_template import ChatTemplate, of_model
from inference.chat.guarded_template import GuardedTemplate
from inference.chat.template_files import DEFAULT, TOOL_USE, template_texts
from inference.chat.template_process import WRONG
from inference.errors import InvalidRequest, TemplateError
from inference.generation.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inference.http.offload import in_thread, release_memory
from inference.workers.control_tokens import ControlTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.messages import ModelInfo

INLINE_CHARACTERS = 8192
"""Longer texts are tokenised in a thread, so that the event loop keeps serving streams."""
INLINE_MESSAGES = 16
CHARACTERS_PER_TOKEN = 8
"""Characters per token above which a text is tokenised only in part."""
PART_CHARACTERS = 1 << 16
MUCH_TEXT = 1 << 18
"""Length in characters of a text after whose tokenising freed memory is returned to the system."""
EDGE_TOKENS = 64
"""Tokens beside a cut that may differ from those of the whole text."""
PROMPT_END_TOKENS = 8
"""The last tokens of a prompt that are searched for an open reasoning tag."""
MAX_RENDERED_CHARACTERS = 4_000_000
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 3
"""The most tokens before one that completes a character of UTF-8, if each has a byte of it."""


class Beginning(list[int]):
    """The first ids of a prompt over the limit, which has at least `least` ids, or just so many if it is `known` to the
    end.
    """

    def __init__(self, ids: list[int], least: int, known: bool) -> None:
        super().__init__(ids)
        self.least, self.known = least, known


def length_in_words(prompt: list[int]) -> str:
    """The number of a prompt's ids for an error: "9003", or "at least 9003" if not all of it was tokenised."""
    if not isinstance(prompt, Beginning):
        return str(len(prompt))
    return str(prompt.least) if prompt.known else f"at least {prompt.least}"


@dataclass(slots=True)
class ModelTokenizer:
    """Encodes prompts and decodes tokens for one model."""

    fast: FastTokenizer
    special_ids: frozenset[int]
    template: ChatTemplate | None
    configuration: dict[str, Any]
    """tokenizer_config.json, including the chat template from whichever file it was read."""
    tool_style: Style = "hermes"
    may_reason: bool = False
    """Whether outputs may begin with reasoning: the template or the vocabulary contains the tags."""
    control: ControlTokens | None = None
    """Escapes special tokens in client text; None if clients may write them."""
    tool_template: ChatTemplate | None = None
    """The template of conversations with tools, if the model has one of its own for them."""
    _texts: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, info: ModelInfo, parse_special_tokens: bool = True, chat_template: str = "") -> ModelTokenizer:
        """Load the files that the worker named; raises OSError or ValueError if they are unusable.

        Without `parse_special_tokens`, names of special tokens in client text are plain text. `chat_template`
        replaces the model's own unless it is empty.
        """
        directory = Path(info.directory)
        try:
            fast = FastTokenizer.from_file(info.tokenizer_file)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"tokenizer.json cannot be used: {error}") from error
        fast.no_truncation()
        fast.no_padding()
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("tokenizer_config.json is not an object")
        # One of a client of the control plane is for all conversations; those of the model came with its weights.
        texts = {} if chat_template else template_texts(directory, config)
        text = chat_template or texts.get(DEFAULT)
        tool_text = texts.get(TOOL_USE)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special_texts = {name: t for name in names if (t := _content(config.get(name))) is not None}
        special_ids = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)
        given = ChatTemplate(GuardedTemplate(chat_template), special_texts) if chat_template else None
        template, tool_template = given or of_model(text, special_texts), of_model(tool_text, special_texts)
        may_reason = (
            any(reasoning.END in written for written in (text, tool_text) if written)
            or fast.token_to_id(reasoning.END) is not None
        )
        shown = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "chat_template": text}
        control = None if parse_special_tokens else ControlTokens(Path(info.tokenizer_file), fast)
        return cls(
            fast,
            special_ids,
            template,
            shown,
            style_of(tool_text or text or ""),
            may_reason,
            control,
            tool_template,
        )

    @property
    def _encoder(self) -> FastTokenizer:
        return self.fast if self.control is None else self.control.plain

    @property
    def tool_tag_is_special(self) -> bool:
        """Whether the tag of a tool call is a special token, which decoding may skip."""
        return self.fast.token_to_id(TAGS[self.tool_style]) in self.special_ids

    def reasoning_ids(self, vocab_size: int) -> tuple[int, int] | None:
        """The ids of the reasoning tags, if each is a single token."""
        begin, end = self.fast.token_to_id(reasoning.BEGIN), self.fast.token_to_id(reasoning.END)
        return None if begin is None or end is None or max(begin, end) >= vocab_size else (begin, end)

    def leaves_reasoning_open(self, prompt_token_ids: list[int]) -> bool:
        """Whether the prompt ends inside a reasoning block."""
        return self.may_reason and reasoning.opens_reasoning(self.decode(prompt_token_ids[-PROMPT_END_TOKENS:]))

    async def encode(
        self, prompt: Prompt, keep_last: int | None = None, keep_first: int | None = None, limit: int | None = None
    ) -> list[int]:
        """The prompt's token ids; raises InvalidRequest or TemplateError.

        `keep_last` truncates to that many ids from the end; leading special tokens stay, as in transformers'
        truncation. The caller truncates to `keep_first`, and rejects more than `limit` ids: a text that is much
        longer is tokenised only in part, and is returned as a Beginning of `limit + 1` ids if it is too long.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids if keep_last is None else prompt.token_ids[-keep_last:]
        if isinstance(prompt, ChatPrompt):
            rendered = await self._rendered(prompt)
            text = rendered if self.control is None else self.control.with_aliases(rendered)
            prompt = TextPrompt(text, prompt.add_special_tokens)
        text, special = prompt.text, prompt.add_special_tokens
        if keep_last is not None or keep_first is not None:
            ids = await self._end_of(text, special, keep_last, keep_first)
        elif limit is not None and len(text) > max(CHARACTERS_PER_TOKEN * limit, INLINE_CHARACTERS):
            if len(text) > PART_CHARACTERS and (beginning := await self._beginning(text, limit)) is not None:
                return beginning
            ids = await self._ids(text, special)
            if len(ids) > limit:
                return Beginning(ids[: limit + 1], len(ids), known=True)
        else:
            ids = await self._ids(text, special)
        return self.cut(ids, keep_last, special)

    async def _beginning(self, text: str, limit: int) -> Beginning | None:
        """Tokenise in parts until the limit is exceeded; None if the text may fit."""
        ids, at, parts = list[int](), 0, 0
        while at < len(text):
            end = _boundary(text, at + PART_CHARACTERS)
            ids += await self._ids(text[at:end], add_special_tokens=False)
            at, parts = end, parts + 1
            if len(ids) > limit + EDGE_TOKENS * parts:
                return Beginning(ids[: limit + 1], len(ids) - EDGE_TOKENS * parts, known=False)
        return None

    async def _end_of(self, text: str, special: bool, keep_last: int | None, keep_first: int | None) -> list[int]:
        """Tokenise one end of the text, enough for the kept ids; the whole text if the cut is ambiguous."""
        keep = keep_last or keep_first or 0
        window = 2 * CHARACTERS_PER_TOKEN * (keep + EDGE_TOKENS)
        if len(text) > max(2 * window, INLINE_CHARACTERS):
            cut = _boundary(text, len(text) - window if keep_last is not None else window)
            ids = await self._ids(text[cut:] if keep_last is not None else text[:cut], special)
            if len(ids) >= keep + EDGE_TOKENS:
                return ids
        return await self._ids(text, special)

    async def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_unicode(text)
        if len(text) <= INLINE_CHARACTERS:
            return list(self._encoder.encode(text, add_special_tokens=add_special_tokens).ids)

        def work() -> list[int]:  # only the batch form releases the GIL; this one computes no offsets
            ids = list(self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            if len(text) > MUCH_TEXT:
                release_memory()
            return ids

        return await asyncio.to_thread(work)

    def cut(self, ids: list[int], keep_last: int | None, has_special_tokens: bool) -> list[int]:
        """The last `keep_last` ids; leading special tokens are kept."""
        if keep_last is None or len(ids) <= keep_last:
            return ids
        leading = next((i for i, token in enumerate(ids) if token not in self.special_ids), 0)
        leading = min(leading if has_special_tokens else 0, keep_last)
        return ids[:leading] + ids[len(ids) - (keep_last - leading) :]

    async def encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """Token ids with the character range of each."""
        return (await self.encodings([text], add_special_tokens))[0]

    async def encodings(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        """`encoding` of several texts; long ones run in a thread."""
        for text in texts:
            _check_unicode(text)
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self._encoder.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        # Only the batch form releases the GIL, without which the thread would not help.
        return await asyncio.to_thread(self._encoder.encode_batch, texts, add_special_tokens=add_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, including special tokens."""
        known = self._texts.get(token_id)
        if known is not None:
            return known
        raw = self.fast.id_to_token(token_id)
        if raw is None:
            return ""
        text: str = self.fast.decode([token_id], skip_special_tokens=False)
        text = f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text
        self._texts[token_id] = text  # bounded by the vocabulary
        return text

    def token_text_after(self, context: Sequence[int], token_id: int) -> str:
        """The same of a token that comes after `context`. Of tokens that form a character only together the last one has it, and those
        before it nothing of it, so that the texts of a sequence's tokens together are its text.
        """
        text = self.token_text(token_id)
        if not text.endswith(REPLACEMENT):
            return text
        for count in range(1, min(CONTEXT_TOKENS, len(context)) + 1):
            before = list(context[-count:])
            whole = self.decode([*before, token_id])
            begun = self.decode(before).rstrip(REPLACEMENT)
            if not whole.endswith(REPLACEMENT) and whole.startswith(begun):
                return whole.removeprefix(begun)
        return text.rstrip(REPLACEMENT)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """The texts of a sequence's tokens; tokens that form a character only together are one piece."""
        stream = DecodeStream(skip_special_tokens=False)
        return [piece for token in token_ids if (piece := stream.step(self.fast, token))]

    def decode_long(self, token_ids: list[int]) -> str:
        """Decode with special tokens, for use in a thread: this form releases the GIL."""
        text: str = self.fast.decode_batch([token_ids], skip_special_tokens=False)[0]
        return text

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of a token sequence."""
        text: str = self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    async def chat_encoding(self, prompt: ChatPrompt) -> tuple[str, Encoding]:
        """The rendered template, and its tokens with the character range of each."""
        text = await self._rendered(prompt)
        if self.control is None:
            return text, await self.encoding(text, prompt.add_special_tokens)
        return self.control.unescape(text), await self.encoding(
            self.control.with_aliases(text), prompt.add_special_tokens
        )

    async def _rendered(self, prompt: ChatPrompt) -> str:
        """Render the template; long conversations run in a thread, and so does waiting for a template's own process."""
        if self.template is not None and self.template.thread is not None:
            return await asyncio.get_running_loop().run_in_executor(self.template.thread, self.render, prompt)
        short = len(prompt.messages) <= INLINE_MESSAGES and not prompt.template_arguments
        if short and sum(_length(message) for message in prompt.messages) <= INLINE_CHARACTERS:
            return self.render(prompt)
        return await in_thread(self.render, prompt)

    def render(self, prompt: ChatPrompt) -> str:
        """Render the chat template, up to the end of the final message if that is continued.

        With `control`, special tokens in the messages are escaped by stand-ins.
        """
        template = self.template
        if self.tool_template is not None and prompt.template_arguments.get("tools"):
            template = self.tool_template
        if template is None:
            raise TemplateError(
                "This model has no usable chat template; use a completion route or add one to the model."
            )
        messages, arguments = prompt.messages, prompt.template_arguments
        if self.control is not None:
            # Reasoning tags are written by the assistant, and templates search for them.
            tags, none = frozenset((reasoning.BEGIN, reasoning.END)), frozenset[str]()
            try:
                messages = [self.control.escape(m, tags if m.get("role") == "assistant" else none) for m in messages]
                arguments = self.control.escape(arguments)
            except RecursionError as error:  # arguments of a call, which are JSON in a text
                raise TemplateError("The messages are nested too deeply.") from error
        marker = f"{secrets.token_hex(16)} " if prompt.continue_final_message else ""
        if marker:
            messages = _marked(messages, marker)
        # As in transformers, a client's arguments replace special tokens.
        asked = {"messages": messages, "add_generation_prompt": prompt.add_generation_prompt}
        try:
            text = template.render({**arguments, **asked})
        except WRONG as error:
            raise TemplateError(f"The chat template refused the messages: {str(error)[:300]}") from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise TemplateError(f"The chat template produced more than {MAX_RENDERED_CHARACTERS} characters.")
        return _up_to(marker, text, messages[-1]["content"]) if marker else text


def _marked(messages: list[dict[str, Any]], marker: str) -> list[dict[str, Any]]:
    """The messages with a marker at the end of the final content; raises TemplateError if there is none."""
    final = messages[-1]
    if not final.get("content"):
        raise TemplateError("The final message has no content, so it cannot be continued.")
    return [*messages[:-1], {**final, "content": final["content"] + marker}]


def _up_to(marker: str, text: str, marked: str) -> str:
    """A rendered text up to the end of its final content, which the marker shows: the content itself may occur anywhere.

    The marker ends with a space. A template that drops it drops the content's last white space as well.
    """
    before, found, after = text.rpartition(marker.rstrip())
    content = marked.removesuffix(marker).strip()
    if not found or not before.rstrip().endswith(content):
        raise TemplateError("The chat template changed the final message, so it cannot be continued.")
    return before if after.startswith(" ") or not content else before.rstrip()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text holds a lone surrogate, which is not valid Unicode") from error


def _length(message: dict[str, Any]) -> int:
    """The characters of a message; a message with anything but text counts as long."""
    if not all(isinstance(value, str | None) for value in message.values()):
        return INLINE_CHARACTERS + 1
    return sum(len(value or "") for value in message.values())


def _boundary(text: str, near: int) -> int:
    """A position at or shortly before `near` where no word is cut: white space after another character."""
    if near >= len(text):
        return len(text)
    for at in range(near, max(near - 1024, 1), -1):
        if text[at].isspace() and not text[at - 1].isspace():
            return at
    return near


def _content(token: Any) -> str | None:
    """A special token's text: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
