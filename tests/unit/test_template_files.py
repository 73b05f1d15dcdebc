"""Which chat template a conversation gets, from the files in which models are published."""

from __future__ import annotations

import json
import shutil

import pytest
from msgspec.structs import replace

from inference.errors import TemplateError
from inference.generation.requests import ChatPrompt
from inference.workers.tokenizer import ModelTokenizer
from tests.conftest import DEMO
from tests.unit.scripts import model_info

PLAIN = "plain: {{ messages[0].content }}"
WITH_TOOLS = "with {{ tools | length }} tools: {{ messages[0].content }} <tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LISTED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]


@pytest.fixture
def load(tmp_path):
    """Makes a tokenizer from the demo model's, with other templates: `files` are texts by path."""

    def make(files: dict[str, str], **options: str) -> ModelTokenizer:
        shutil.copy(DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        info = replace(model_info(), directory=str(tmp_path), tokenizer_file=str(tmp_path / "tokenizer.json"))
        return ModelTokenizer.load(info, **options)

    return make


def rendered(tokenizer: ModelTokenizer, tools: list | None = None) -> str:
    arguments = {} if tools is None else {"tools": tools}
    return tokenizer.render(ChatPrompt([{"role": "user", "content": "Hi"}], template_arguments=arguments))


FILES = {
    "a list in tokenizer_config.json": {"tokenizer_config.json": json.dumps({"chat_template": LISTED})},
    "names in tokenizer_config.json": {
        "tokenizer_config.json": json.dumps({"chat_template": {"default": PLAIN, "tool_use": WITH_TOOLS}})
    },
    "files": {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
    "chat_template.json": {"chat_template.json": json.dumps({"chat_template": LISTED})},
    "a file before older places": {
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
        "tokenizer_config.json": json.dumps({"chat_template": "older"}),
        "chat_template.json": json.dumps({"chat_template": "oldest"}),
    },
}


@pytest.mark.parametrize("place", FILES)
def test_a_conversation_with_tools_has_a_template_of_its_own(load, place):
    tokenizer = load(FILES[place])
    assert rendered(tokenizer) == "plain: Hi"
    assert rendered(tokenizer, []) == "plain: Hi"
    assert rendered(tokenizer, TOOLS) == "with 1 tools: Hi <tool_call>"
    assert tokenizer.tool_style == "hermes"


@pytest.mark.parametrize(
    "files", [{"chat_template.jinja": PLAIN}, {"chat_template.json": json.dumps({"chat_template": PLAIN})}]
)
def test_one_template_is_for_all(load, files):
    tokenizer = load(files)
    assert rendered(tokenizer) == rendered(tokenizer, TOOLS) == "plain: Hi"


def test_only_a_template_for_tools(load):
    tokenizer = load({"tokenizer_config.json": json.dumps({"chat_template": LISTED[1:]})})
    assert rendered(tokenizer, TOOLS) == "with 1 tools: Hi <tool_call>"
    with pytest.raises(TemplateError, match="no usable chat template"):
        rendered(tokenizer)


def test_a_deployments_own_template_is_for_all_conversations(load):
    tokenizer = load(FILES["files"], chat_template="own: {{ messages[0].content }}")
    assert rendered(tokenizer) == rendered(tokenizer, TOOLS) == "own: Hi"


@pytest.mark.parametrize("files", [
    {"tokenizer_config.json": json.dumps({"chat_template": [1, {"name": 2}, {"name": "default", "template": 3}]})},
    {"chat_template.json": "[]"}, {"chat_template.jinja": "{% if"},
])  # fmt: skip
def test_templates_that_cannot_be_used_are_none(load, files):
    with pytest.raises(TemplateError, match="no usable chat template"):
        rendered(load(files))
