"""No code decides by the wording of a failure: codes and types do that."""

import ast
from pathlib import Path

from engine.failures import FinishReason

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "inference", "management", "config")
SENTENCES = {"error", "reason", "why", "refusal", "failure", "err", "exc", "exception"}
"""What sentences are called; with `.message` and `str()` of these."""
METHODS = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count", "split", "partition"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer"}
ONLY_A_SENTENCE = {
    "engine/models/record.py": "torch's and a model's own TypeError: only its text says which argument was not known",
    "inference/http/validation.py": "msgspec.ValidationError says field and mismatch in its text alone",
    "inference/generation/text.py": "tokenizers raises a plain Exception for an invalid prefix",
}
"""Where another's library tells something by its sentence alone."""


def is_sentence(node: ast.AST, others: frozenset[str] = frozenset()) -> bool:
    """`others`: names that have been given a sentence."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "words"):
        return bool(node.args) and is_sentence(node.args[0])
    if isinstance(node, ast.Attribute):
        return node.attr in SENTENCES or (node.attr in ("message", "args", "words") and is_sentence(node.value))
    return isinstance(node, ast.Name) and node.id in SENTENCES | others


def is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
        parts = node.keys if isinstance(node, ast.Dict) else node.elts
        return any(part is not None and is_text(part) for part in parts)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value not in ("", *FinishReason)
    return isinstance(node, ast.JoinedStr)


def decides(node: ast.AST, others: frozenset[str]) -> bool:
    """Whether the node compares a sentence with a text, or looks for one in it."""

    def is_one(part: ast.AST) -> bool:
        return is_sentence(part, others)

    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        looks_inside = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops) and is_one(sides[-1])
        return looks_inside or (any(map(is_one, sides)) and any(map(is_text, sides)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in METHODS and is_one(node.func.value):
            return True
        if node.func.attr == "get" and isinstance(node.func.value, ast.Dict):
            return is_text(node.func.value) and any(map(is_one, ast.walk(node.args[0])))
        return node.func.attr in PATTERNS and any(map(is_one, node.args))
    return False


def found(source: str) -> list[int]:
    tree = ast.parse(source)
    given = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    names = {t.id for node in given if is_sentence(node.value) for t in node.targets if isinstance(t, ast.Name)}
    return [node.lineno for node in ast.walk(tree) if decides(node, frozenset(names))]


def test_no_code_decides_by_a_sentence():
    places = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            lines = found(file.read_text())
            if lines:
                places[str(file.relative_to(ROOT))] = lines
    assert {path: lines for path, lines in places.items() if path not in ONLY_A_SENTENCE} == {}
    assert set(ONLY_A_SENTENCE) <= set(places)


def test_what_it_would_find():
    for source in (
        'output.error.startswith("grammar: ")',
        'error == "draining"',
        '"modules_to_save" in reason',
        "RANK.search(error.message)",
        '"Invalid prefix" in str(error)',
        '{"overloaded": 1}.get(output.error or "", 2)',
        "why == ENDED and why in reason",
        "text = str(error)\nAT.search(text)",
        "'rank' in words(failure)",
    ):
        assert found(source), source
    for source in ("error is None", "reason or None", "failure.code is FailureCode.GRAMMAR", "code in error.facts"):
        assert not found(source), source
