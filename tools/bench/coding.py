"""Measures products with coded weights beside those with plain ones, over more memory than caches hold.

    python -m tools.bench.coding [--wide 9728] [--hidden 896] [--copies 12] [--rows 1 4 8 16 32 64 256] [--rounds 9]

Milliseconds for all copies, the best of the rounds, in which both forms take turns; all usable CPUs.
"""

from __future__ import annotations

import argparse
import os

import torch

from engine.cpu.kernels import ops
from engine.cpu.kernels.coded import can_code, encode
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.spaced_rows import spaced_rows
from engine.cpu.weight_coding import copies_of, seconds_of


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", type=int, default=9728, help="outputs, a multiple of 32")
    parser.add_argument("--hidden", type=int, default=896, help="inputs")
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    packed = ops.pack_weight((torch.randn(arguments.wide, arguments.hidden) * 0.02).bfloat16())
    coded = encode(packed) if can_code() else None
    if coded is None:
        raise SystemExit("this CPU or this weight is not for coding")
    set_num_threads(len(os.sched_getaffinity(0)))
    forms = copies_of(packed, coded, arguments.copies)
    print(f"{coded.packed.nbytes / packed.nbytes:.3f} of the memory\n")
    print("| rows | plain ms | coded ms | of the time |\n| --- | --- | --- | --- |")
    for rows in arguments.rows:
        x, out = (spaced_rows(rows, width, torch.bfloat16) for width in (arguments.hidden, arguments.wide))
        x.copy_(torch.randn(rows, arguments.hidden))
        plain, other = (seconds * 1e3 for seconds in seconds_of(*forms, x, out, arguments.rounds))
        print(f"| {rows} | {plain:.2f} | {other:.2f} | {other / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
