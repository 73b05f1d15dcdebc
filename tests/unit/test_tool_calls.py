"""Tool calls and thoughts in a model's text: what is found, and that it does not matter in which pieces it comes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.chat.call_styles import MACHINES, listed, only_arguments, style_of
from inference.chat.conversation import parse_messages
from inference.chat.reasoning import ReasoningSplitter, opens_reasoning
from inference.chat.tool_calls import CallPart, ToolCallParser
from inference.chat.tools import tool_grammar
from inference.generation.structured import closed
from tests.grammars import admits


def parse(machine, pieces: list[str], names=None, whole=False) -> tuple[str, list[tuple[str, str]]]:
    """The text beside the calls, and each call's name and arguments."""
    parser = ToolCallParser(machine, names, whole)
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
    ("llama3", ' {"answer": 3, "x": 1} done', ' {"answer": 3, "x": 1} done', []),
    ("llama3", 'hello {"name": "f"}', 'hello {"name": "f"}', []),
    ("llama3", '{"name": "f"', '{"name": "f"', []),
    ("llama3", '{"name": "f", "parameters": {"a"', "", [("f", '{"a"')]),
    ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3", '{"name": "f"} or {"name": "f", "type": "x"}', '{"name": "f"} or {"name": "f", "type": "x"}', []),
    ("llama3", f"I ask {written('llama3', F)}, then {written('llama3', G)} now", "I ask, then now", [F, G]),
    ("llama3", f'{{"calls": [{written("llama3", F)}]}} {written("llama3", G)}',
     f'{{"calls": [{written("llama3", F)}]}}', [G]),
    ("llama3", f"{{x | x > 0}} {written('llama3', G)}", "{x | x > 0}", [G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
     '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
     '<tool_call>{"name": "f", "arguments": 1}</tool_call>', []),
    ("mistral", f"[TOOL_CALLS] [{written('mistral', F)}, {written('mistral', G)}]", "", [F, G]),
    ("mistral", f"ok[TOOL_CALLS]f[CALL_ID]abc[ARGS]{F[1]}[TOOL_CALLS]g{G[1]}", "ok", [F, G]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 1}}</tool_call>', "",
     [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call> so', " so", [("f", "{}")]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {F[1]}}}<tool_call>{{"name": "g", "arguments": {G[1]}}}</tool_call>', "",
     [F, G]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {F[1]}}}\nThe rest', "\nThe rest", [F]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {F[1]}}}\n</tool_ca', "", [F]),
    ("mistral", f'[TOOL_CALLS] [{written("mistral", F)}, {{"na', '{"na', [F]),
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


@pytest.mark.parametrize(("style", "text"), [
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": "other"}</tool_call>'),
    ("llama3", '{"name": "other", "parameters": {}}'),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS]other{"a": 1}'),
    ("mistral", '[TOOL_CALLS][{"name": "other", "arguments": {}}]'),
])  # fmt: skip
def test_a_call_names_a_function_that_is_known(style, text):
    for pieces in ([text], list(text)):
        assert parse(MACHINES[style], pieces, {"f"}) == (text, [])
        assert parse(MACHINES[style], pieces, {"f", "other"})[1] != []


@pytest.mark.parametrize(("style", "text"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>'),
    ("llama3", '{"name": "f", "parameters": {"a": "b" "c"}}'),
    ("llama3", '{"name": "f", "parameters": {}, "age": 3}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("llama3", '{"name": "f", "parameters": {"a": [-Infinity]}}'),
    ("mistral", "[TOOL_CALLS]f{'a': 1}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {oops}'),
    ("llama3", '{"name": "f", "parameters": {oops}'),
])  # fmt: skip
def test_a_whole_answer_has_no_broken_calls(style, text):
    """A stream has shown the call's name and the beginning of its arguments already."""
    for pieces in ([text], list(text)):
        assert parse(MACHINES[style], pieces, {"f"}, whole=True) == (text, [])
        assert [name for name, _ in parse(MACHINES[style], pieces, {"f"})[1]] == ["f"]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_a_whole_answer_has_the_calls_of_a_stream(style, text, content, calls):
    if "oops" not in text:
        for pieces in ([text], list(text)):
            assert parse(MACHINES[style], pieces, whole=True) == (content, calls)


def test_a_whole_answer_keeps_a_call_that_was_cut():
    for text, arguments in (('{"a": 1', '{"a": 1'), ('{"a": 1}', '{"a": 1}')):
        cut = f'<tool_call>{{"name": "f", "arguments": {text}'
        assert parse(MACHINES["hermes"], [cut], whole=True) == ("", [("f", arguments)])


def test_a_deeply_nested_call_is_no_error():
    deep = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200_000 + "]" * 200_000 + "}}</tool_call>"
    assert parse(MACHINES["hermes"], [deep], whole=True) == (deep, [])


CODE = "def f():\n\treturn '\\'\x01\r\n"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("style", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": %s, "name": "write"}</tool_call>'),
        ("llama3", '{"name": "write", "parameters": %s}'),
        ("mistral", "[TOOL_CALLS]write%s"),
    ],
)
def test_control_characters_in_strings_are_escaped(style, call, whole):
    """As small models write code."""
    raw = '{\n  "code": "' + CODE.replace("\\", "\\\\") + '",\n\t"lines": [2]\n}'
    texts = [call % raw]
    if style != "mistral":  # arguments as text
        texts += [call % json.dumps(raw), call % json.dumps(raw).replace("\\n", "\n")]
    for text in texts:
        for pieces in ([text], list(text)):
            content, ((name, arguments),) = parse(MACHINES[style], pieces, whole=whole)
            assert (content, name) == ("", "write")
            assert json.loads(arguments) == {"code": CODE, "lines": [2]}
            (message,) = parse_messages([{"role": "assistant", "tool_calls": [
                {"function": {"name": name, "arguments": arguments}}]}])  # fmt: skip
            assert message["tool_calls"][0]["function"]["arguments"]["code"] == CODE


def test_a_backslash_at_the_end_of_a_line_stays():
    """It is no JSON, but a stream has shown the beginning."""
    text = '<tool_call>{"name": "run", "arguments": {"a": "x \\\ny"}}</tool_call>'
    for pieces in ([text], list(text)):
        content, ((_, arguments),) = parse(MACHINES["hermes"], pieces)
        assert (content, json.loads(arguments)) == ("", {"a": "x \\\ny"})
        assert parse(MACHINES["hermes"], pieces, whole=True) == (text, [])


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


def function(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_forced_call_may_have_what_several_schemas_allow():
    branches = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
    grammar = tool_grammar([function("f", allOf=branches)], {"function": {"name": "f"}}).grammar
    assert admits(grammar, '{"a": 1, "b": 2}')
    assert not admits(grammar, '{"a": 1}')


@pytest.mark.parametrize(
    ("tools", "call", "other"),
    [
        (
            [function("f", type="object", properties={"v": {"type": "integer"}, "next": {"$ref": "#"}}, required=["v"])],
            '{"name": "f", "arguments": {"v": 1, "next": {"v": 2}}}',
            '{"name": "f", "arguments": {"v": 1, "next": [{"name": "f", "arguments": {"v": 2}}]}}',
        ),
        (
            [function(name, type="object", properties={"v": {"$ref": f"#/{key}/N"}}, **{key: {"N": {"type": kind}}})
             for name, key, kind in (("f", "definitions", "string"), ("g", "$defs", "integer"), ("h", "$defs", "null"))],
            '{"name": "g", "arguments": {"v": 5}}',
            '{"name": "h", "arguments": {"v": 5}}',
        ),
        (
            [function("f", type="object", properties={"default": {"$ref": "#/$defs/N"}}, **{"$defs": {"N": {"type": "null"}}})],
            '{"name": "f", "arguments": {"default": null}}',
            '{"name": "f", "arguments": {"default": 5}}',
        ),
        (
            [function("f", type="object", properties={"v": {"const": {"$ref": "#"}}})],
            '{"name": "f", "arguments": {"v": {"$ref": "#"}}}',
            '{"name": "f", "arguments": {"v": {"$ref": "#/$defs/0"}}}',
        ),
    ],
)  # fmt: skip
def test_references_of_forced_calls_are_those_of_their_own_function(tools, call, other):
    grammar = tool_grammar(tools, "required").grammar
    assert admits(grammar, f"[{call}]")
    assert not admits(grammar, f"[{other}]")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"properties": {"a": {}}, "additionalProperties": True}),
        ({"anyOf": [{"properties": {}}, {"type": "null"}]}, {"anyOf": [{"properties": {}, "additionalProperties": False}, {"type": "null"}]}),
        ({"properties": {}, "anyOf": [{"properties": {}}]}, {"properties": {}, "anyOf": [{"properties": {}}]}),
        ({"properties": {"properties": {"type": "string"}}},
         {"properties": {"properties": {"type": "string"}}, "additionalProperties": False}),
        ({"allOf": [{"$ref": "#/$defs/A"}, {"properties": {}}], "$defs": {"A": {"properties": {}}, "B": {"properties": {}}}},
         {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {}}],
          "$defs": {"A": {"properties": {}}, "B": {"properties": {}, "additionalProperties": False}}}),
    ],
)  # fmt: skip
def test_objects_are_closed_where_no_other_schema_has_a_say(schema, expected):
    assert closed(schema, "tools", bare_too=False) == expected
