"""Packs what a GPU machine without a network lacks: the server's locked packages but those that it has, for its
Python.

    python -m tools.gpu.packages [--python-version 3.12] [--to .gpu-wheels/site.tar.xz]

Such a machine has torch, transformers and Triton with what they need. transformers and tokenizers are packed all the
same, as the lock has them. Unpacked beside the code, the archive's folder goes first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "serve.lock"
THERE = {
    "annotated-doc", "anyio", "attrs", "certifi", "charset-normalizer", "click", "filelock", "fsspec", "h11", "hf-xet",
    "idna", "jinja2", "llvmlite", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "msgpack", "networkx", "numba", "numpy",
    "packaging", "prometheus-client", "psutil", "psycopg", "psycopg-binary", "pygments", "pyyaml", "regex", "requests", "rich",
    "safetensors", "sentencepiece", "setuptools", "shellingham", "sympy", "tiktoken", "torch", "tqdm", "triton", "typer",
    "typing-extensions", "urllib3",
}  # fmt: skip
"""Packages of the lock that the machine has, or that a server on SQLite does without."""
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 38, 39)
"""Minor versions of glibc in the names of wheels; pip takes each only by its exact name."""


def locked() -> list[str]:
    """The lock's requirements that have to be packed."""
    lines = [
        line.split()[0] for line in LOCK.read_text().splitlines() if "==" in line and not line.startswith((" ", "#"))
    ]
    return [line for line in lines if line.partition("==")[0] not in THERE]


def _untranslated(each: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Translations are a third of Django. The default language's must be there, and so must the packages around the
    others.
    """
    translation = each.name.endswith((".po", ".mo")) and "/en/" not in each.name
    return None if translation else each


def main() -> None:
    """Download the wheels, unpack them into one folder, and pack that with English texts alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--to", type=Path, default=ROOT / ".gpu-wheels" / "site.tar.xz")
    options = parser.parse_args()
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [f"manylinux{year}_x86_64" for year in (1, 2010, 2014)]
    abis = [f"cp{options.python_version.replace('.', '')}", "abi3", "none"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
    ]
    command += ["--python-version", options.python_version, *(each for abi in abis for each in ("--abi", abi))]
    command += [each for tag in tags for each in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        subprocess.run([*command, "-d", str(wheels), *locked()], check=True)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        options.to.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.to, "w:xz") as packed:
            packed.add(site, ".", filter=_untranslated)
    print(f"{options.to}: {options.to.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
