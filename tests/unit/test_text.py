"""From tokens to text and back: incomplete characters, stop strings, truncation, special tokens that clients write."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from inference.chat.chat_template import of_model
from inference.dialects.openai.chat import parse_prompt
from inference.dialects.openai.schema import ChatCompletionRequest
from inference.errors import InvalidRequest, TemplateError
from inference.generation.requests import ChatPrompt, TextPrompt, TokenPrompt
from inference.generation.text import IncrementalDecoder, StopStrings
from inference.workers.tokenizer import PART_CHARACTERS, Beginning, ModelTokenizer, length_in_words
from tests.unit.scripts import ids, model_info, says

TOKENIZER = ModelTokenizer.load(model_info())
TEXTS = st.text(st.sampled_from("ab "), max_size=30)


@pytest.mark.parametrize("text", ["The capital of Spain.", "Hé 🙂 ok", "日本語", "a\n\nb"])
def test_pieces_make_the_text(text):
    decoder = IncrementalDecoder(TOKENIZER.fast, [], TOKENIZER.special_ids)
    assert "".join(decoder.step(token) for token in ids(text)) == text


def test_a_character_is_shown_when_it_is_whole():
    decoder = IncrementalDecoder(TOKENIZER.fast, [], TOKENIZER.special_ids)
    pieces = [decoder.step(token) for token in ids("🙂")]
    assert pieces == [*[""] * (len(pieces) - 1), "🙂"]
    assert len(pieces) > 1


def test_bytes_that_never_become_a_character_hold_nothing_back():
    decoder = IncrementalDecoder(TOKENIZER.fast, [], TOKENIZER.special_ids)
    text = "".join(decoder.step(token) for token in [ids("🙂")[0], *ids("abc def ghi")])
    assert text.endswith("abc def ghi")


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        return TOKENIZER.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)


class CountingStream:
    """A DecodeStream in its rules, whose tokenizer counts."""

    def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
        self.ids, self.skip = list(ids), skip_special_tokens
        self.prefix, self.read = "", 0

    def step(self, tokenizer: CountingTokenizer, token: int) -> str | None:
        if not self.prefix and self.ids:
            self.prefix, self.read = tokenizer.decode(self.ids, self.skip), len(self.ids)
        self.ids.append(token)
        text = tokenizer.decode(self.ids, self.skip)
        if len(text) <= len(self.prefix) or text.endswith("\ufffd"):
            return None
        shown, self.ids = text[len(self.prefix) :], self.ids[self.read :]
        self.prefix, self.read = tokenizer.decode(self.ids, self.skip), len(self.ids)
        return shown


@pytest.mark.parametrize("token", [2, ids("🙂")[0], 1_000_000])
def test_tokens_without_text_cost_no_more_the_more_they_are(monkeypatch, token):
    """Special ones, bytes that are no characters, ids that the tokenizer does not know."""
    monkeypatch.setattr("inference.generation.text.DecodeStream", CountingStream)
    tokenizer = CountingTokenizer()
    decoder = IncrementalDecoder(tokenizer, ids("The capital"), TOKENIZER.special_ids)
    for _ in range(3000):
        decoder.step(token)
    assert tokenizer.decoded <= 3000 * 200


BYTES = st.sampled_from([*ids("🙂"), *ids("é"), *ids("日"), 2, 1_000_000])


@given(st.lists(BYTES, max_size=400), st.sampled_from(["", "The capital"]))
def test_the_text_is_that_of_all_tokens_at_once(tokens, prompt):
    """Also where many make no character, and where a character begins in the last of them."""
    tokens = [*tokens, *ids(" of Spain 🙂.")]
    decoder = IncrementalDecoder(TOKENIZER.fast, ids(prompt), TOKENIZER.special_ids)
    text = "".join(map(decoder.step, tokens))
    assert text == TOKENIZER.fast.decode(tokens, skip_special_tokens=True)


def byte_fallback() -> Tokenizer:
    """Words with a space before them, and bytes: as in Llama 2. The ids: 1 " Hi", 2 " you", 3 to 6 the bytes of an emoji."""
    vocabulary = ["<unk>", "▁Hi", "▁you", *(f"<0x{byte:02X}>" for byte in "🙂".encode())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], [1, 3, 4, 5, 6, 2], [1, 3, 2], [1, *[6] * 300, 2, 1], [1, *[99] * 300, 2, 1], [1, *[3, 99] * 300, 2, 1]],
)
def test_bytes_and_spaces_are_as_in_the_text_at_once(tokens):
    decoder = IncrementalDecoder(byte_fallback(), [], frozenset())
    assert "".join(map(decoder.step, tokens)) == byte_fallback().decode(tokens)


@pytest.mark.parametrize("held", [1, 20, 200])
def test_bytes_that_would_change_a_shown_character_are_shown_alone(held):
    decoder = IncrementalDecoder(byte_fallback(), [], frozenset())
    assert "".join(map(decoder.step, [1, 3, 4, 5, 6, *[6] * held, 2, 1])) == "Hi🙂" + "\ufffd" * held + " you Hi"


@pytest.mark.parametrize("broken", [ids("🙂")[:2], ids("\ufffd")])
def test_a_prompt_that_ends_in_half_a_character_is_not_shown(broken):
    decoder = IncrementalDecoder(TOKENIZER.fast, [*ids("The capital"), *broken], TOKENIZER.special_ids)
    assert "".join(map(decoder.step, ids(" of Spain"))) == " of Spain"


def test_special_tokens_are_shown_where_that_is_asked_for():
    assert IncrementalDecoder(TOKENIZER.fast, [], TOKENIZER.special_ids).step(2) == ""
    assert IncrementalDecoder(TOKENIZER.fast, [], frozenset()).step(2) == "<|im_end|>"


@given(
    st.lists(TEXTS, max_size=8),
    st.lists(st.text(st.sampled_from("ab "), min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(parts, stop, include):
    """The one that is complete first ends the text, of several the first of the list; nothing of it was shown before."""
    stops, shown, found = StopStrings(stop, include), "", None
    for part in parts:
        text, found = stops.feed(part)
        shown += text
        if found is not None:
            break
    whole = "".join(parts)
    ends = [(at + len(s), place, at) for place, s in enumerate(stop) if (at := whole.find(s)) >= 0]
    if not ends:
        assert found is None
        assert shown + stops.flush() == whole
        return
    end, place, at = min(ends)
    assert found == stop[place]
    assert shown == whole[: end if include else at]


def test_many_stop_strings_cost_no_more_than_few():
    """Whatever their number, a character is looked up once for each length."""
    stops = StopStrings([chr(0x4E00 + i) for i in range(20_000)] + ["Madrid"], False)
    assert stops.feed("The capital of Spain is Ma") == ("The capital of Spain ", None)
    assert stops.feed("drid.") == ("is ", "Madrid")


def test_what_may_become_a_stop_string_is_held_back():
    stops = StopStrings(["Madrid"], False)
    assert stops.feed(" is Mad") == (" i", None)
    assert stops.feed("e") == ("s", None)
    assert stops.flush() == " Made"


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, 0), (1, 0), (2, 0), (3, 1), (9, 1), (10, 2)])
@pytest.mark.parametrize("stop", [" of", "l of", "The capital of"])
@pytest.mark.parametrize("per_step", [1, 20])
async def test_no_stop_string_ends_in_the_first_tokens(serving, min_tokens, shown, stop, per_step):
    """As in vLLM it may begin there; these end with the third token and the tenth one."""
    text = "The capital of Spain is Madrid. The capital of Spain is Madrid."
    serving.worker.default = says(text, per_step=per_step)
    body = {"model": "demo", "prompt": "a", "stop": stop, "max_tokens": 99, "min_tokens": min_tokens}
    answer = await serving.post("/v1/completions", body)
    assert answer.json()["choices"][0]["text"] == stop.join(text.split(stop)[: shown + 1])


async def test_truncation_keeps_an_end():
    text = TextPrompt("The capital of Spain is Madrid")
    whole = await TOKENIZER.encode(text)
    assert await TOKENIZER.encode(text, keep_last=2) == whole[-2:]
    assert await TOKENIZER.encode(TokenPrompt([1, 2, 3]), keep_last=2) == [2, 3]
    assert await TOKENIZER.encode(text, keep_last=99) == whole


@pytest.mark.parametrize(("keep", "special", "expected"), [
    (4, True, [1, 7, 8, 9]), (2, True, [1, 9]), (1, True, [1]), (4, False, [6, 7, 8, 9]), (9, True, [1, 5, 6, 7, 8, 9]),
])  # fmt: skip
def test_leading_special_tokens_outlive_truncation(keep, special, expected):
    assert TOKENIZER.cut([1, 5, 6, 7, 8, 9], keep, special) == expected


@pytest.mark.parametrize(("keep_last", "keep_first"), [(20, None), (None, 20)])
async def test_long_texts_are_cut_as_if_all_had_been_tokenised(keep_last, keep_first):
    text = " ".join(f"The capital of country {i} is Madrid." for i in range(3000))
    whole = ids(text)
    cut = await TOKENIZER.encode(TextPrompt(text), keep_last=keep_last, keep_first=keep_first)
    assert (cut == whole[-20:]) if keep_last else (cut[:20] == whole[:20])


async def test_far_too_long_texts_are_tokenised_as_far_as_is_needed():
    text = "The capital of Spain. " * 20000
    beginning = await TOKENIZER.encode(TextPrompt(text), limit=100)
    assert isinstance(beginning, Beginning)
    assert beginning == ids(text[:4000])[:101]
    assert length_in_words(beginning) == f"at least {beginning.least}"
    assert 101 <= beginning.least <= len(ids(text[:PART_CHARACTERS]))


async def test_the_length_of_a_text_that_is_too_long_is_the_true_one():
    text = "hello world. " * 3000
    beginning = await TOKENIZER.encode(TextPrompt(text), limit=100)
    assert len(beginning) == 101
    assert length_in_words(beginning) == str(len(ids(text)))


@pytest.mark.parametrize(("path", "body", "plane"), [
    ("/generate", {"inputs": "hello world. " * 3000}, "front"),
    ("/v1/completions", {"model": "demo", "prompt": "hello world. " * 3000}, "front"),
    ("/infer", {"inputs": "hello world. " * 3000}, "mindie"),
])  # fmt: skip
async def test_refusals_state_the_true_length(serving, path, body, plane):
    answer = await serving.post(path, body, plane=plane)
    assert answer.status in (400, 422, 424)
    assert str(len(ids("hello world. " * 3000))) in answer.text


async def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        await TOKENIZER.encode(TextPrompt("\ud800"))


async def test_chat_templates():
    hello = [{"role": "user", "content": "Hello"}]
    assert TOKENIZER.render(ChatPrompt(hello)) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.render(ChatPrompt(hello, add_generation_prompt=False)).endswith("<|im_end|>\n")
    begun = [*hello, {"role": "assistant", "content": "The cap"}]
    text = TOKENIZER.render(ChatPrompt(begun, add_generation_prompt=False, continue_final_message=True))
    assert text.endswith("assistant\nThe cap")
    with pytest.raises(TemplateError, match="refused"):
        TOKENIZER.render(ChatPrompt([{"content": "a"}]))
    with pytest.raises(TemplateError, match="no usable chat template"):
        replace(TOKENIZER, template=None).render(ChatPrompt(hello))


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMING = PLAIN.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        *((PLAIN, text, text) for text in ("<", "e", "im_end", "assistant", "<|im_end|>", "Answer: ", "def f():\n    ", " ", "\n")),
        (TRIMMING, "e", "e"),
        (TRIMMING, " Answer: ", "Answer:"),
        (TRIMMING, "def f():\n    ", "def f():"),
        (TRIMMING, " \n", ""),
    ],
)  # fmt: skip
def test_a_final_message_is_continued_at_its_end(template, content, end, apart):
    """White space at its end stays where the template leaves it."""
    tokenizer = ModelTokenizer.load(model_info(), parse_special_tokens=not apart)
    tokenizer = replace(tokenizer, template=of_model(template, {}))
    messages = [{"role": "user", "content": "e <"}, {"role": "assistant", "content": content}]
    text = tokenizer.render(ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))
    shown = tokenizer.control.unescape(text) if tokenizer.control is not None else text
    assert shown == f"<|im_start|>user\ne <<|im_end|>\n<|im_start|>assistant\n{end}"
    assert messages[-1]["content"] == content


@pytest.mark.parametrize(
    ("template", "content", "reason"),
    [
        (PLAIN, "", "has no content"),
        (PLAIN.replace("m.content", "m.content | upper"), "Hello", "changed the final message"),
        (PLAIN.replace("m.content", "m.content | replace('a', '')"), "pasta", "changed the final message"),
        ("{{ messages[0].content }}", "Hello", "changed the final message"),
    ],
)
def test_a_final_message_that_cannot_be_continued(template, content, reason):
    tokenizer = replace(TOKENIZER, template=of_model(template, {}))
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    with pytest.raises(TemplateError, match=reason):
        tokenizer.render(ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))


SHOWN = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}{{ add_generation_prompt }}"


@pytest.mark.parametrize("own", ["", SHOWN])
def test_arguments_of_a_template_replace_special_tokens(own):
    """As in transformers, whose template it may be, or a client's own."""
    tokenizer = ModelTokenizer.load(model_info(), chat_template=own)
    if not own:
        tokenizer = replace(tokenizer, template=of_model(SHOWN, {"bos_token": "<s>", "eos_token": "none"}))
    given = {"eos_token": "</s>", "messages": [], "self": 1, "add_generation_prompt": False}
    chat = ChatPrompt([{"role": "user", "content": "Hello"}], template_arguments=given)
    begin = tokenizer.configuration.get("bos_token") or "" if own else "<s>"
    assert tokenizer.render(chat) == f"{begin}</s>HelloTrue"


async def test_arguments_with_a_meaning_of_their_own_are_left_out(serving):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    given = {"bos_token": "", "self": 1, "messages": [], "tools": 1, "add_generation_prompt": False, "chat_template": "a",
             "continue_final_message": True}  # fmt: skip
    for fields in ({}, {"chat_template_kwargs": given}):
        answer = await serving.post("/v1/chat/completions", {**body, **fields})
        assert answer.status == 200, answer.text
    first, second = (submit.prompt_token_ids for submit in serving.worker.submits)
    assert first == second


def test_an_effort_of_reasoning_is_that_of_the_body():
    body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
    given = {"reasoning_effort": "high", "enable_thinking": False}
    prompt = parse_prompt(msgspec.convert({**body, "chat_template_kwargs": given}, ChatCompletionRequest))
    assert prompt.template_arguments == {"reasoning_effort": "low", "enable_thinking": False}


async def test_special_tokens_that_clients_write_are_text_where_that_is_set():
    apart = ModelTokenizer.load(model_info(), parse_special_tokens=False)
    text = TextPrompt("a<|im_end|>b")
    assert 2 in await TOKENIZER.encode(text)
    assert 2 not in await apart.encode(text)
    chat = ChatPrompt([{"role": "user", "content": "a<|im_end|>b"}])
    assert (await TOKENIZER.encode(chat)).count(2) == 2
    assert (await apart.encode(chat)).count(2) == 1
    shown, _ = await apart.chat_encoding(chat)
    assert shown == TOKENIZER.render(chat)


def test_a_tokenizer_that_is_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ModelTokenizer.load(model_info(directory=str(tmp_path), tokenizer_file=str(tmp_path / "tokenizer.json")))
