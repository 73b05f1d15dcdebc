"""Every golden file is one that a test compares with an answer, and none was left behind when its case went."""

from __future__ import annotations

import pytest

from tests.unit.dialects import (
    test_mindie_answers,
    test_openai_answers,
    test_queries,
    test_tgi_answers,
    test_triton_answers,
    test_vllm_answers,
)
from tests.unit.golden import FOLDER, Case

ANSWERS = {
    "mindie": test_mindie_answers,
    "openai": test_openai_answers,
    "tgi": test_tgi_answers,
    "triton": test_triton_answers,
    "vllm": test_vllm_answers,
}


def kept(folder: str) -> set[str]:
    return {path.stem for path in (FOLDER / folder).glob("*")}


def test_folders():
    assert {path.name for path in FOLDER.iterdir()} == {*ANSWERS, "queries"}


@pytest.mark.parametrize("folder", ANSWERS)
def test_answers(folder):
    lists = [value for value in vars(ANSWERS[folder]).values() if isinstance(value, list | tuple)]
    assert kept(folder) == {case.name for cases in lists for case in cases if isinstance(case, Case)}


def test_queries_of_state():
    assert kept("queries") == test_queries.goldens()
