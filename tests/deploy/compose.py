"""Reads the compose file as Compose does: defaults of variables put in, anchors resolved, images from the Dockerfile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT
from tests.deploy.dockerfile import Image, Stage, chain, image_of, read_stages

FILE = ROOT / "docker-compose.yml"
INSTALLED = re.compile(r"install -d -o (?P<owner>\d+) -g (?P=owner) -m 0750 (?P<folders>(?:/[\w/]+ ?)+)")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def variables(path: Path = FILE) -> dict[str, str]:
    """Every variable of the file with its default."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return {name: default for line in lines for name, default in VARIABLE.findall(line)}


def load(path: Path = FILE, **given: str) -> dict[str, Any]:
    """The file's content with its variables put in."""
    return interpolated(yaml.safe_load(path.read_text()), given)


def interpolated(value: Any, given: dict[str, str]) -> Any:
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: given.get(found[1]) or found[2] or "", value)
    if isinstance(value, dict):
        return {key: interpolated(inner, given) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolated(inner, given) for inner in value]
    return value


@dataclass(frozen=True, slots=True)
class Service:
    """One service, with what its image says where the file says nothing."""

    name: str
    fields: dict[str, Any]
    image: Image
    ours: bool
    owners: dict[str, int]
    """The folders that its image makes for volumes, and who owns them: a new volume has the same owner."""

    @property
    def command(self) -> list[str]:
        return [*self.image.entrypoint, *map(str, self.fields.get("command", self.image.command))]

    @property
    def environment(self) -> dict[str, str]:
        return {**self.image.environment, **{k: str(v) for k, v in self.fields.get("environment", {}).items()}}

    @property
    def user(self) -> str:
        return str(self.fields.get("user", self.image.user))

    @property
    def health(self) -> list[str]:
        check = self.fields.get("healthcheck", {})
        if check.get("disable"):
            return []
        test = [str(word) for word in check.get("test", [])]
        return test[1:] if test else self.image.health

    @property
    def once(self) -> bool:
        """Whether it does its work and ends."""
        return self.fields["restart"] in ("on-failure", "no")

    @property
    def volumes(self) -> list[tuple[str, str, bool]]:
        """Source, path and whether it is read-only."""
        parts = [text.split(":") for text in self.fields.get("volumes", [])]
        return [(part[0], part[1], part[2:] == ["ro"]) for part in parts]

    @property
    def depends_on(self) -> dict[str, str]:
        return {name: each["condition"] for name, each in self.fields.get("depends_on", {}).items()}


def _owners(stages: list[Stage], target: str) -> dict[str, int]:
    """The folders that the stages' `install -d` make, and the numbers of their owners."""
    runs = [each.value for stage in chain(stages, target) for each in stage.instructions if each.keyword == "RUN"]
    made = [found for text in runs for found in INSTALLED.finditer(text)]
    return {folder: int(found["owner"]) for found in made for folder in found["folders"].split()}


def services(**given: str) -> dict[str, Service]:
    """The services by name."""
    found = {}
    for name, fields in load(**given)["services"].items():
        build = fields.get("build")
        stages = read_stages(ROOT / "Dockerfile", build["args"]) if build else []
        image = image_of(stages, build.get("target", "")) if build else Image()
        found[name] = Service(
            name, fields, image, build is not None, _owners(stages, build.get("target", "")) if build else {}
        )
    return found
