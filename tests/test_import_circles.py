"""The contract that `make test` checks finds circles through any number of files, and nothing in a tree."""

from itertools import pairwise

from grimp import ImportGraph

from tools.lint.import_circles import circle_in


def graph(*imports: tuple[str, str]) -> ImportGraph:
    made = ImportGraph()
    for importer, imported in imports:
        made.add_import(importer=importer, imported=imported)
    return made


def test_a_circle_is_named_file_by_file():
    found = circle_in(graph(("a.x", "a.y"), ("a.y", "b"), ("b", "a.x"), ("a.z", "a.x")), {"a", "b"})
    assert found[0] == found[-1]
    assert set(found) == {"a.x", "a.y", "b"}
    assert all(pair in {("a.x", "a.y"), ("a.y", "b"), ("b", "a.x")} for pair in pairwise(found))


def test_a_tree_and_what_is_not_ours_are_none():
    assert circle_in(graph(("a.x", "a.y"), ("a.x", "a.z"), ("a.y", "a.z")), {"a"}) == []
    assert circle_in(graph(("a", "c"), ("c", "a")), {"a"}) == []
