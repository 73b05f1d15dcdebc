"""A model's tokenizer and chat template, read from its own files. It knows no dialect and runs no model code."""

from __future__ import annotations

import asyncio
import datetime
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import structlog
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from inference import reasoning
from inference.errors import InvalidRequest, TemplateError
from inference.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inference.tool_calls import MARKS, Style, style_of

if TYPE_CHECKING:
    from engine.messages import ModelInfo

logger = structlog.get_logger(__name__)

INLINE_CHARACTERS = 8192
"""Longer texts are tokenised in a thread, so that the event loop goes on serving streams."""
PROMPT_END_TOKENS = 8
"""So many of a prompt's last tokens tell whether it leaves the model thinking."""
MAX_RENDERED_CHARACTERS = 4_000_000


@dataclass(slots=True)
class ModelTokenizer:
    """Encodes prompts and decodes tokens for one model."""

    fast: FastTokenizer
    special_ids: frozenset[int]
    template: jinja2.Template | None
    special_texts: dict[str, str]
    configuration: dict[str, Any]
    """tokenizer_config.json, with the chat template wherever that came from."""
    tool_style: Style = "hermes"
    thinks: bool = False
    """Whether outputs may begin with thoughts: the template or the vocabulary knows their marks."""

    @classmethod
    def load(cls, info: ModelInfo) -> ModelTokenizer:
        """Read the files that the worker named; raises OSError or ValueError when they are unusable."""
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
        text = _template_text(directory, config)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special_texts = {name: t for name in names if (t := _content(config.get(name))) is not None}
        special_ids = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)
        try:
            template = None if text is None else _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:  # such a model still completes text
            logger.warning("chat template not usable", reason=str(error))
            template = None
        thinks = reasoning.END in (text or "") or fast.token_to_id(reasoning.END) is not None
        shown = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "chat_template": text}
        return cls(fast, special_ids, template, special_texts, shown, style_of(text or ""), thinks)

    @property
    def tool_mark_is_special(self) -> bool:
        """Whether the mark of a tool call would be lost with the special tokens."""
        return self.fast.token_to_id(MARKS[self.tool_style]) in self.special_ids

    def thought_ids(self, vocab_size: int) -> tuple[int, int] | None:
        """The tokens that begin and end thoughts, where each is one token that the model knows."""
        begin, end = self.fast.token_to_id(reasoning.BEGIN), self.fast.token_to_id(reasoning.END)
        return None if begin is None or end is None or max(begin, end) >= vocab_size else (begin, end)

    def leaves_thinking(self, prompt_token_ids: list[int]) -> bool:
        """Whether the prompt begins thoughts and does not end them."""
        return self.thinks and reasoning.opens_thoughts(self.decode(prompt_token_ids[-PROMPT_END_TOKENS:]))

    async def encode(self, prompt: Prompt, keep_last: int | None = None) -> list[int]:
        """The prompt's token ids; raises InvalidRequest or TemplateError.

        `keep_last` cuts to so many ids from the end; leading special tokens stay, as in transformers' truncation.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids if keep_last is None else prompt.token_ids[-keep_last:]
        if isinstance(prompt, ChatPrompt):
            prompt = TextPrompt(self.render(prompt), prompt.add_special_tokens)
        ids = list((await self.encoding(prompt.text, prompt.add_special_tokens)).ids)
        return self.cut(ids, keep_last, prompt.add_special_tokens)

    def cut(self, ids: list[int], keep_last: int | None, has_special_tokens: bool) -> list[int]:
        """The last `keep_last` ids; where special tokens lead, they stay."""
        if keep_last is None or len(ids) <= keep_last:
            return ids
        leading = next((i for i, token in enumerate(ids) if token not in self.special_ids), 0)
        leading = min(leading if has_special_tokens else 0, keep_last)
        return ids[:leading] + ids[len(ids) - (keep_last - leading) :]

    async def encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """Token ids with the character range that each covers."""
        return (await self.encodings([text], add_special_tokens))[0]

    async def encodings(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        """As `encoding`, of several; long texts are worked on beside the event loop."""
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("the text holds a lone surrogate, which is not valid Unicode") from error
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self.fast.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        # The batch form alone releases the interpreter's lock, without which the thread would be of no use.
        return await asyncio.to_thread(self.fast.encode_batch, texts, add_special_tokens=add_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special tokens included."""
        raw = self.fast.id_to_token(token_id)
        if raw is None:
            return ""
        text: str = self.fast.decode([token_id], skip_special_tokens=False)
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    def pieces(self, token_ids: list[int]) -> list[str]:
        """The texts of a sequence's tokens; tokens that make a character only together are one piece."""
        stream = DecodeStream(skip_special_tokens=False)
        return [piece for token in token_ids if (piece := stream.step(self.fast, token))]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of a token sequence."""
        text: str = self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def render(self, prompt: ChatPrompt) -> str:
        """The model's chat template over the messages."""
        if self.template is None:
            raise TemplateError(
                "This model has no usable chat template; use a completion route or add one to the model."
            )
        try:
            text = self.template.render(
                messages=prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                **self.special_texts,
                **prompt.template_arguments,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            LookupError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(f"The chat template refused the messages: {str(error)[:300]}") from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise TemplateError(f"The chat template produced more than {MAX_RENDERED_CHARACTERS} characters.")
        if prompt.continue_final_message:
            final = str(prompt.messages[-1].get("content") or "").strip()
            if final not in text:
                raise TemplateError("The chat template changed the final message, so it cannot be continued.")
            text = text[: text.rindex(final) + len(final)]
        return text


def _template_text(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's `chat_template` (a text, or the one named "default")."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """A special token's text: written as a string, or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates: sandboxed, and without access to anything outside."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
