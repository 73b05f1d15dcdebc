"""Reads a Dockerfile: its stages with arguments put in, and the configuration of the image that a stage makes.

It knows the instructions that this project's Dockerfile has, and refuses others rather than guess.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEYWORDS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER",
    "VOLUME", "WORKDIR",
}  # fmt: skip
UNSUPPORTED = {"ADD"}
"""Known, and refused: it fetches and unpacks, where COPY says what it does."""


class DockerfileError(ValueError):
    """The file cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: COPY with `flags` {"from": "builder"} and `value` "/a /b"."""

    keyword: str
    value: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The value as a list: of JSON if it is one, else of a shell's words."""
        if self.value.startswith("["):
            return [str(word) for word in json.loads(self.value)]
        return shlex.split(self.value)


@dataclass(slots=True)
class Stage:
    """A FROM and what follows it, with all arguments put in."""

    name: str
    base: str
    arguments: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Image:
    """The configuration of an image, as `docker inspect` shows it."""

    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    ports: list[int] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)


def read_stages(path: Path, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages in order; `arguments` are those of `--build-arg`. Raises DockerfileError."""
    given, defaults, stages = dict(arguments or {}), {}, []
    for instruction in _instructions(path.read_text()):
        keyword, value = instruction.keyword, instruction.value
        if keyword in UNSUPPORTED:
            raise DockerfileError(f"{keyword} is not used here")
        if keyword == "FROM":
            base, _, name = expand(value, defaults | given).partition(" AS ")
            stages.append(Stage(name.strip() or str(len(stages)), base.strip()))
        elif keyword == "ARG":
            name, has_default, default = value.partition("=")
            if not stages:
                defaults[name] = default
            elif name in given or has_default or name in defaults:
                stages[-1].arguments[name] = given.get(name, default if has_default else defaults.get(name, ""))
        elif not stages:
            raise DockerfileError(f"{keyword} stands before the first FROM")
        else:
            stages[-1].instructions.append(instruction)
    return stages


def expand(text: str, values: Mapping[str, str]) -> str:
    """The text with `$NAME` and `${NAME}` replaced."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)


def chain(stages: list[Stage], name: str = "") -> list[Stage]:
    """The stages that a stage is built on, the first one before; the last stage of the file without a name."""
    by_name = {stage.name: stage for stage in stages}
    found = [by_name[name] if name else stages[-1]]
    while found[0].base in by_name:
        found.insert(0, by_name[found[0].base])
    return found


def image_of(stages: list[Stage], name: str = "") -> Image:
    """The configuration of the image that a stage makes; that of the base image is not known here."""
    image = Image()
    for stage in chain(stages, name):
        for instruction in stage.instructions:
            _apply(image, instruction, stage.arguments)
    return image


def _apply(image: Image, instruction: Instruction, arguments: Mapping[str, str]) -> None:
    keyword = instruction.keyword
    values = {**arguments, **image.environment}
    text = expand(instruction.value, values) if keyword not in ("RUN", "CMD", "ENTRYPOINT") else instruction.value
    parts = Instruction(keyword, text, instruction.flags)
    if keyword in ("ENV", "LABEL"):
        pairs = dict(word.split("=", 1) for word in parts.words)
        (image.environment if keyword == "ENV" else image.labels).update(pairs)
    elif keyword == "USER":
        image.user = text
    elif keyword == "WORKDIR":
        image.folder = text
    elif keyword == "ENTRYPOINT":
        image.entrypoint, image.command = parts.words, []
    elif keyword == "CMD":
        image.command = parts.words
    elif keyword == "HEALTHCHECK":
        image.health = [] if text == "NONE" else Instruction("CMD", text.partition("CMD ")[2]).words
    elif keyword == "STOPSIGNAL":
        image.stop_signal = text
    elif keyword == "EXPOSE":
        image.ports += [int(word) for word in parts.words]
    elif keyword == "VOLUME":
        image.volumes += parts.words


def _instructions(text: str) -> list[Instruction]:
    """Every instruction, with continued lines joined and comments left out."""
    found, line = [], ""
    for number, raw in enumerate(text.splitlines(), 1):
        if raw.lstrip().startswith("#") or (not raw.strip() and not line):
            continue
        line += raw.rstrip()
        if line.endswith("\\"):
            line = line[:-1] + " "
            continue
        keyword, _, rest = line.strip().partition(" ")
        if keyword not in KEYWORDS:
            raise DockerfileError(f"line {number}: {keyword} is no instruction")
        flags, rest = {}, rest.strip()
        while (flag := re.match(r"--([a-z-]+)=(\S+)\s+", rest)) is not None:
            flags[flag[1]] = flag[2]
            rest = rest[flag.end() :]
        found.append(Instruction(keyword, rest.strip(), flags))
        line = ""
    return found
