"""A contract for import-linter: no files import each other in a circle, imports for types alone included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class NoCirclesContract(Contract):
    """The files of `packages`, each taken by itself: a package is not its files."""

    type_name = "no_circles"

    packages = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Broken with the first circle that is found."""
        circle = circle_in(graph, self.packages)
        return ContractCheck(kept=not circle, metadata={"circle": circle})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """The circle, each file importing the next."""
        output.print_error("\n-> ".join(check.metadata["circle"]))


def circle_in(graph: ImportGraph, packages: set[str]) -> list[str]:
    """Names of files of which each imports the next, the first once more at the end; empty where there is no circle."""
    files = {name for name in graph.modules if name.partition(".")[0] in packages}
    sorter = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) & files for name in sorted(files)})
    try:
        sorter.prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []
