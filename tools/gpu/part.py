"""Runs one part of the campaign in this process; `tools.gpu.campaign` starts it.

    python -m tools.gpu.part MODULE [ARGUMENT] --part NAME --results FILE --device NAME --commit COMMIT --folder DIR [--dry]

A cell that fails is written down with its reason, and the next one is measured. Exit status 1: a cell failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tools.gpu.results import Figure, Results

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Run:
    """What a part measures with. `folder` keeps models from one part to the next. In a dry run the device is the CPU."""

    part: str
    argument: str
    results: Results
    folder: Path
    dry: bool
    failed: int = 0
    _done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu" if self.dry else "cuda")
        self._done = self.results.done(self.part)

    def missing(self, cell: str) -> bool:
        """Whether the file has no figures of the cell yet."""
        return cell not in self._done

    def measure(self, cell: str, figures: Callable[[], list[Figure]]) -> None:
        """Measure a missing cell and write it down."""
        if not self.missing(cell):
            return
        try:
            found = figures()
            if not found:
                raise RuntimeError("nothing was measured")
        except (
            Exception
        ) as error:  # a cell that fails must not take the others with it; the file and the terminal say why
            traceback.print_exc()
            self.failed += 1
            self.results.add(self.part, cell, [], f"{type(error).__name__}: {error}"[:500])
            return
        self.results.add(self.part, cell, found)
        said = ", ".join(f"{f.row} {f.value:.4g} {f.unit}" for f in found[:3])
        print(f"{self.part}: {cell}: {said}", flush=True)


def main() -> int:
    """Run the module's `run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("argument", nargs="?", default="")
    parser.add_argument("--part", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    results = Results(options.results, options.device, options.commit)
    run = Run(options.part, options.argument, results, options.folder, options.dry)
    importlib.import_module(f"tools.gpu.{options.module}").run(run)
    return int(run.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
