"""Asks a running server in every dialect and compares the answers with what the dialects' clients need.

It changes nothing on the server. A key comes from `--key-file`, else from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2

from config.conformance import openai, others, services
from config.conformance.session import Addresses, Broken, Session, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PORTS = {"djl": 8085, "mindie": 1025, "triton_grpc": 8001, "torchserve_grpc": 7070}
"""The usual ports of the dialects that have planes or services of their own, by the field of Addresses."""
NONE = "none"


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect, the address that it is asked at, and its checks."""

    title: str
    address: str
    checks: tuple[Callable[[Session], None], ...]


DIALECTS = {
    "openai": Dialect("OpenAI", "front", openai.OPENAI),
    "vllm": Dialect("vLLM", "front", openai.VLLM),
    "tgi": Dialect("TGI", "front", others.TGI),
    "triton": Dialect("Triton", "front", others.TRITON),
    "triton-grpc": Dialect("Triton, gRPC", "triton_grpc", services.TRITON),
    "mindie": Dialect("MindIE", "mindie", others.MINDIE),
    "djl": Dialect("DJL Serving", "djl", others.DJL),
    "torchserve": Dialect("TorchServe, gRPC", "torchserve_grpc", services.TORCHSERVE),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One check's outcome: passed, failed or skipped, and why."""

    dialect: str
    check: str
    outcome: str
    reason: str = ""


def main(program: str, arguments: list[str]) -> int:
    """`conformance URL`: the exit status is 0, 1 if a check failed, 2 if nothing could be checked."""
    parser = _parser(program)
    parsed = parser.parse_args(arguments)
    try:
        addresses = addresses_of(parsed)
        key = parsed.key_file.read_text().strip() if parsed.key_file else os.environ.get("OPENAI_API_KEY", "")
        roots = parsed.ca.read_bytes() if parsed.ca else None
        verify = ssl.create_default_context(cafile=str(parsed.ca)) if parsed.ca else True
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    client = httpx2.Client(verify=verify, timeout=parsed.timeout, trust_env=False)
    session = Session(addresses, client, key, parsed.model, roots, parsed.timeout)
    try:
        results = list(check(session, parsed.dialect or list(DIALECTS)))
    finally:
        session.close()
    failed = [result for result in results if result.outcome == "failed"]
    passed = [result for result in results if result.outcome == "passed"]
    print(rendered(results) if parsed.json else shown(results))
    if failed:
        return 1
    return 0 if passed else 2


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program} conformance", description=__doc__)
    parser.add_argument("url", help="The front plane, such as http://127.0.0.1:8000.")
    parser.add_argument("--model", default="", help="The model to ask; default: the first that is listed.")
    parser.add_argument("--dialect", action="append", choices=sorted(DIALECTS), help="May be repeated. Default: all.")
    parser.add_argument("--key-file", type=Path, help="File with an API key.")
    parser.add_argument("--ca", type=Path, help="PEM file of the server's authority; gRPC then has TLS as well.")
    parser.add_argument("--timeout", type=float, default=60.0, help="Seconds for one answer (60).")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    for field, port in PORTS.items():
        flag = "--" + field.replace("_", "-")
        kind = "HOST:PORT" if field.endswith("grpc") else "URL"
        parser.add_argument(flag, metavar=kind, help=f"Default: port {port} of the URL's host; `{NONE}`: not checked.")
    return parser


def addresses_of(parsed: argparse.Namespace) -> Addresses:
    """The addresses that the arguments name. Raises ValueError."""
    url = urlsplit(parsed.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"url: {parsed.url!r} is no address: http(s)://host:port is expected")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    found = {}
    for field, port in PORTS.items():
        given = getattr(parsed, field)
        usual = f"{host}:{port}" if field.endswith("grpc") else f"{url.scheme}://{host}:{port}"
        found[field] = "" if given == NONE else (given or usual).rstrip("/")
    return Addresses(parsed.url.rstrip("/"), **found)


def check(session: Session, names: list[str]) -> Iterator[Result]:
    """The results of the checks of these dialects, in order."""
    for name in names:
        dialect = DIALECTS[name]
        if not getattr(session.addresses, dialect.address):
            continue
        for function in dialect.checks:
            title = (function.__doc__ or function.__name__).strip().rstrip(".")
            try:
                function(session)
            except Skipped as reason:
                yield Result(name, title, "skipped", str(reason))
            except Broken as reason:
                yield Result(name, title, "failed", str(reason))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
                # an answer of another shape than the dialect's
                yield Result(
                    name, title, "failed", f"the answer has another form ({type(problem).__name__}: {problem})"
                )
            else:
                yield Result(name, title, "passed")


def rendered(results: list[Result]) -> str:
    """The results as JSON."""
    rows = [
        {"dialect": each.dialect, "check": each.check, "outcome": each.outcome, "reason": each.reason}
        for each in results
    ]
    return json.dumps({"failed": sum(row["outcome"] == "failed" for row in rows), "checks": rows}, indent=2)


def shown(results: list[Result]) -> str:
    """The results as lines, and a table of the dialects."""
    colours = {"passed": "32", "failed": "31", "skipped": "33"} if sys.stdout.isatty() else {}
    lines = []
    for each in results:
        word = each.outcome.ljust(8)
        painted = f"\033[{colours[each.outcome]}m{word}\033[0m" if colours else word
        lines.append(f"{painted} {each.dialect:12} {each.check}")
        if each.reason:
            lines.append(f"{'':22}{each.reason}")
    lines += ["", f"{'dialect':18} {'passed':>7} {'failed':>7} {'skipped':>8}"]
    for name in dict.fromkeys(each.dialect for each in results):
        counts = [
            sum(each.dialect == name and each.outcome == outcome for each in results)
            for outcome in ("passed", "failed", "skipped")
        ]
        lines.append(f"{DIALECTS[name].title:18} {counts[0]:7} {counts[1]:7} {counts[2]:8}")
    return "\n".join(lines)
