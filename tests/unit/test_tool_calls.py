"""Tool calls and thoughts in a model's text: what is found, and that it does not matter in which pieces it comes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.chat.reasoning import ReasoningSplitter, opens_reasoning
from inference.chat.tool_calls import MACHINES, CallPart, ToolCallParser, listed, only_arguments, style_of


def parse(machine, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text beside the calls, and each call's name and arguments."""
    parser = ToolCallParser(machine)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallPart):
            if part.name is not None:
                assert part.index == len(calls)
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    assert parser.calls == len(calls)
    return "".join(part for part in parts if isinstance(part, str)), [tuple(call) for call in calls]


F, G = ("f", '{"a": "x}<\\"]", "b": [1, {}]}'), ("g", "{}")
OBJECT = {"hermes": "arguments", "mistral": "arguments", "llama3": "parameters"}


def written(style: str, call: tuple[str, str]) -> str:
    return f'{{"name": "{call[0]}", "{OBJECT[style]}": {call[1]}}}'


CASES = [
    ("hermes", f"Hi there. \n<tool_call>\n{written('hermes', F)}\n</tool_call>\n<tool_call>{written('hermes', G)}</tool_call>",
     "Hi there.", [F, G]),
    ("hermes", f'<tool_call>{{"arguments": {F[1]}, "name": "f"}}</tool_call> bye', " bye", [F]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", "a <tool_call>nope</tool_call> b", "a <tool_call>nope</tool_call> b", []),
    ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '1 < 2 and {"name": "f"} <tool', '1 < 2 and {"name": "f"} <tool', []),
    ("llama3", f"{written('llama3', F)}; {written('llama3', G)}", "", [F, G]),
    ("llama3", f"<|python_tag|>{written('llama3', F)}", "", [F]),
    ("llama3", f"Let me see. <|python_tag|>{written('llama3', F)}", "Let me see.", [F]),
    ("llama3", ' {"answer": 3, "x": 1} done', '{"answer": 3, "x": 1} done', []),
    ("llama3", 'hello {"name": "f"}', 'hello {"name": "f"}', []),
    ("llama3", '{"name": "f"', "", [("f", "")]),
    ("mistral", f"[TOOL_CALLS] [{written('mistral', F)}, {written('mistral', G)}]", "", [F, G]),
    ("mistral", f"ok[TOOL_CALLS]f[CALL_ID]abc[ARGS]{F[1]}[TOOL_CALLS]g{G[1]}", "ok", [F, G]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 1}}</tool_call>', "",
     [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call> so', " so", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', []),
    ("mistral", f"[TOOL_CALLS] {written('mistral', F)}", "", [F]),
    ("mistral", "[TOOL_CALLS]hello there {}", "[TOOL_CALLS]hello there {}", []),
    ("mistral", "[1, 2] [TOOL_CAL", "[1, 2] [TOOL_CAL", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found_in_any_pieces(style, text, content, calls):
    assert parse(MACHINES[style], [text]) == (content, calls)
    assert parse(MACHINES[style], list(text)) == (content, calls)
    for cut in range(len(text)):
        assert parse(MACHINES[style], [text[:cut], text[cut:]]) == (content, calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values)), min_size=1, max_size=3),
    st.sampled_from(["hermes", "llama3", "mistral"]),
    st.booleans(),
)
def test_any_call_comes_out_as_it_was_written(calls, style, ascii_only):
    objects = [
        json.dumps({"name": name, OBJECT[style]: arguments}, ensure_ascii=ascii_only) for name, arguments in calls
    ]
    text = {
        "hermes": "".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects),
        "llama3": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }[style]
    content, found = parse(MACHINES[style], [text])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(st.text(alphabet='<tool_call>/{}":, []namergusTOLCA|py\\'), st.sampled_from(["hermes", "llama3", "mistral"]))
def test_no_text_breaks_a_parser_or_is_lost_where_there_is_no_call(text, style):
    content, calls = parse(MACHINES[style], list(text))
    if not calls:
        assert content.split() == text.split() or content.strip() == text.strip()


def test_long_texts_take_time_in_proportion():
    for style in MACHINES:
        parser = ToolCallParser(MACHINES[style])
        text = "a < b [1] \n\n" * 20_000 + "\n" * 100_000
        start = time.process_time()
        assert parser.feed(text) + parser.end()
        assert time.process_time() - start < 10, "quadratic"


def test_what_a_grammar_enforces():
    assert parse(listed, [f"[ {written('hermes', F)}, {written('hermes', G)} ]"]) == ("", [F, G])
    assert parse(only_arguments("f"), ['{"a"', ": 1}"]) == ("", [("f", '{"a": 1}')])


def test_the_style_is_the_templates_own():
    assert style_of("... <tool_call> ...") == style_of("") == "hermes"
    assert style_of("[TOOL_CALLS]") == "mistral"
    assert style_of("<|python_tag|>") == style_of("ipython, parameters") == "llama3"


@pytest.mark.parametrize(
    ("thinking", "text", "thoughts", "answer"),
    [
        (False, "<think>\nhm\n</think>\n\nYes.", "\nhm\n", "\n\nYes."),
        (False, "\n<think>hm</think><think>x</think>", "hm", "<think>x</think>"),
        (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (False, "<thin", "", "<thin"),
        (False, "<think>never ends </thin", "never ends </thin", ""),
        (True, "hm < 3</think>Yes.", "hm < 3", "Yes."),
        (True, "<think>", "<think>", ""),
    ],
)
def test_thoughts_are_split_from_the_answer_in_any_pieces(thinking, text, thoughts, answer):
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        splitter = ReasoningSplitter(thinking)
        parts = [*(splitter.feed(piece) for piece in pieces), splitter.end()]
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == (thoughts, answer)


def test_a_prompt_may_leave_the_model_thinking():
    assert opens_reasoning("<|assistant|><think>\n")
    assert not opens_reasoning("<think>\n\n</think>\n\n")
