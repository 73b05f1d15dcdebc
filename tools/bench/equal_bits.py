"""Counts sequences whose tokens and log-probabilities are the same alone and in a crowd, to the last bit.

    python -m tools.bench.equal_bits [--model DIR] [--sequences 500] [--dtypes float32 bfloat16 int8 coded]

Each sequence is computed twice: alone, on one thread, its prompt in one piece and without a prefix cache; and among up to 32
others on all threads, with prompts in pieces of up to 48 tokens, a cache of few blocks, so that sequences are preempted, and
prompts that share beginnings, so that the prefix cache is cold for some and warm for others. Half are sampled, with seeds. Where
the model has adapters beside it (the demo model's), two thirds of the sequences use one. `coded`: bfloat16, with plain weights alone and coded
ones in the crowd.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.adapters.files import content_digest
from engine.messages import AdapterRef
from tests.engine.equal_bits import CODED, compare, make_work
from tests.models.random_models import DEMO


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8", CODED])
    arguments = parser.parse_args()
    beside = arguments.model.parent / "demo-adapters"
    paths = sorted(beside.iterdir()) if arguments.model == DEMO and beside.is_dir() else []
    adapters = [AdapterRef(content_digest(path), str(path)) for path in paths if path.is_dir()]
    print("| arithmetic | sequences | equal bits | preemptions |\n| --- | --- | --- | --- |")
    for dtype in arguments.dtypes:
        work = make_work(arguments.sequences, [] if dtype == "int8" else adapters)
        equal, preemptions = compare(arguments.model, dtype, work)
        print(f"| {dtype} | {len(work)} | {equal} | {preemptions} |", flush=True)


if __name__ == "__main__":
    main()
