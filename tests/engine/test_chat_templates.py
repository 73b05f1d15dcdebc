"""The chat template of a conversation is the one that transformers takes for it."""

from __future__ import annotations

import json
import shutil

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from inference.generation.requests import ChatPrompt
from inference.workers.tokenizer import ModelTokenizer
from tests.conftest import DEMO
from tests.unit.scripts import model_info
from tests.unit.test_template_files import FILES, TOOLS


@pytest.mark.parametrize("place", ["a list in tokenizer_config.json", "files", "a file before older places"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_it_is_transformers_own(tmp_path, place, tools):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    for name, text in FILES[place].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = tmp_path / "tokenizer_config.json"
    found = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **found}))
    info = replace(model_info(), directory=str(tmp_path), tokenizer_file=str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hi"}]
    ours = ModelTokenizer.load(info).render(ChatPrompt(messages, template_arguments={"tools": tools} if tools else {}))
    assert ours == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tools=tools, tokenize=False)
