"""Plots the results of `scripts.compare`: tokens per second by case and server, one picture per file.

    python -m scripts.plot docs/results/compare-*.json

The picture is written beside its file, as SVG without dates or random names, so that the same figures give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "dragoman"


def draw(file: Path) -> Path:
    """Bars in groups: a group is a case, a bar a server."""
    record = json.loads(file.read_text())
    servers = list(dict.fromkeys(row["server"] for row in record["rows"]))
    speeds = {(row["case"], row["server"]): row["tokens_per_s"] for row in record["rows"]}
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(servers)
    for number, server in enumerate(servers):
        places = [i + (number - (len(servers) - 1) / 2) * width for i in range(len(record["cases"]))]
        bars = axes.bar(places, [speeds[case, server] for case in record["cases"]], width, label=server)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(record["cases"])), record["cases"])
    axes.set_ylabel("output tokens per second")
    axes.set_title(
        f"{file.stem.removeprefix('compare-')}, {record['machine']['cores']} cores, {record['machine']['cpu']}"
    )
    axes.legend(frameon=False)
    target = file.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def main() -> None:
    """Draw every file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    for file in parser.parse_args().files:
        print(draw(file))


if __name__ == "__main__":
    main()
