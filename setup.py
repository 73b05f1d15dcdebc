"""What the wheel holds; all else about it stands in pyproject.toml.

The packages go into one folder, `dragoman`, because site-packages is no place for a `config` or an `engine` of ours
alone. `dragoman/__main__.py` puts that folder on the path.
"""

from setuptools import find_packages, setup

PARTS = ("config", "engine", "inference", "management")
DATA = ("models",)
"""Folders of files without code."""

setup(
    packages=[
        "dragoman",
        *(f"dragoman.{name}" for part in PARTS for name in find_packages(include=[part, f"{part}.*"])),
        *(f"dragoman.{name}" for name in DATA),
    ],
    package_dir={"dragoman": "dragoman", **{f"dragoman.{name}": name for name in (*PARTS, *DATA)}},
    package_data={
        "": ["*.proto", "*.pyi"],
        "dragoman.management": ["static/**/*", "templates/**/*"],
        **{f"dragoman.{name}": ["**/*"] for name in DATA},
    },
)
