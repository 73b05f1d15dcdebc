"""Runs the tests of Text Generation Inference, unmodified, against this server.

    python -m tools.suites.tgi CHECKOUT [--clients PYTHON] [--hub CHECKOUT PYTHON] [--again] [arguments of pytest]

CHECKOUT is a working copy of github.com/huggingface/text-generation-inference. Nothing is written into it: its
`integration-tests` and `clients/python` are copied into a temporary folder, where `text-generation-launcher` is this
script. For whatever model a test asks, it passes the connections on to one server of the demo model (`manage.py serve`). `--hub` is a working copy of
github.com/huggingface/huggingface_hub, whose tests of text generation and chat are run too, by a PYTHON that has it installed.
In the end `tools/suites/tgi_published.py` looks at the server.

The tests' texts are those of the vendor's weights. Snapshots are therefore taken from this server's answers, and each is
compared with the vendor's in its form: it has their keys at every level, with values of the same types. `--again` runs
everything a second time, against the snapshots of the first. A case that passes but for texts in its own lines
(`tools/suites/tgi_texts.py`) is counted apart.

The first PYTHON (default: this one) needs pytest, pytest-asyncio, syrupy, docker, numpy, openai, requests, aiohttp, jsonschema
and huggingface_hub before 1.0; the other one pytest, pytest-mock, pytest-vcr, numpy, pillow and huggingface_hub. This script never changes a test's file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
DEMO, ADAPTERS = ROOT / "models" / "demo", ROOT / "models" / "demo-adapters"
URL = "SUITE_URL"
"""The environment variable with the server's URL."""
START_S, STOP_S = 120, 60
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""What an element of a case in pytest's report means."""
CONTEXT = 8192
"""Tokens of the model's context; the longest prompt of the tests has some 6,500."""
SHIM = '#!/bin/sh\ncd "{root}" && exec "{python}" -W ignore -m tools.suites.tgi --shim "$@"\n'
TEXTS = "tools.suites.tgi_texts"
HUB_TESTS = ("tests/test_inference_text_generation.py", "tests/test_inference_client.py")
UNUSED = ("GRPC_PORT", "DJL_PORT", "MINDIE_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT")
"""Settings whose 0 disables a plane that the tests do not use."""


def main() -> int:
    """Run the suites, print a table for each; returns the exit status."""
    if sys.argv[1:2] == ["--shim"]:
        return shim(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--clients", default=sys.executable, help="the interpreter that has the tests' packages")
    parser.add_argument("--hub", nargs=2, metavar=("CHECKOUT", "PYTHON"), help="run huggingface_hub's tests too")
    parser.add_argument("--again", action="store_true", help="run the integration tests twice")
    parser.add_argument("tests", nargs="*", help="arguments of pytest for the integration tests")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` ends the server too
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tgi-suite-")))
        environment = prepare(home, options.checkout.resolve())
        url = stack.enter_context(server(home))
        suite = Suite(home, options.clients, {**environment, URL: url})
        failed = suite.integration(options.tests, options.again)
        failed += compare_forms(home, options.checkout.resolve() / "integration-tests")
        failed += suite.client()
        if options.hub is not None:
            failed += suite.hub(Path(options.hub[0]).resolve(), options.hub[1])
        failed += suite.published(options.checkout.resolve(), url)
    return int(failed > 0)


def prepare(home: Path, checkout: Path) -> dict[str, str]:
    """Fill the temporary folder; returns the environment of the tests."""
    shutil.copytree(
        checkout / "integration-tests", home / "integration", ignore=shutil.ignore_patterns("__snapshots__")
    )
    shutil.copytree(checkout / "clients" / "python", home / "client")
    program = home / "bin" / "text-generation-launcher"
    program.parent.mkdir()
    program.write_text(SHIM.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    path = [str(home / "client"), str(ROOT)]
    dropped = ("DOCKER_IMAGE", "HF_HUB_OFFLINE")
    return {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        "HF_TOKEN": "none",  # which the tests insist on, and no server here asks for
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Suite:
    """The tests, in a temporary folder."""

    def __init__(self, home: Path, python: str, environment: dict[str, str]) -> None:
        self.home, self.python, self.environment = home, python, environment

    def integration(self, tests: list[str], again: bool) -> int:
        """The tests that start a launcher; returns how many failed."""
        folder = self.home / "integration"
        arguments = ["--release", *(tests or ["models"])]
        failed = self.pytest("integration-tests", folder, "--snapshot-update", *arguments)
        return failed + (self.pytest("integration-tests again", folder, *arguments) if again else 0)

    def client(self) -> int:
        """The tests of the vendor's client, which name a URL of the hub."""
        cases = self.home / "client" / "tests" / "cases"
        cases.mkdir()
        for path in cases.parent.glob("test_*.py"):
            shutil.move(path, cases)
        shutil.copy(Path(__file__).with_name("tgi_suite_client.py"), cases / "conftest.py")
        return self.pytest("clients/python", cases.parents[1], "tests")

    def hub(self, checkout: Path, python: str) -> int:
        """huggingface_hub's tests of text generation and chat, whose URLs are those of the hub."""
        shutil.copytree(checkout / "tests", self.home / "hub" / "tests", ignore=shutil.ignore_patterns("cassettes"))
        settings = ["-c", os.devnull, "--rootdir", ".", "-p", "tools.suites.tgi_hub"]
        return self.pytest("huggingface_hub", self.home / "hub", *settings, *HUB_TESTS, python=python)

    def published(self, checkout: Path, url: str) -> int:
        """What the vendor publishes; returns 1 if anything differs."""
        command = [self.python, "-m", "tools.suites.tgi_published", str(checkout), url]
        return subprocess.run(command, env=self.environment, check=False).returncode

    def pytest(self, title: str, folder: Path, *arguments: str, python: str = "") -> int:
        """Run pytest in the folder, print the table; returns how many failed."""
        report = self.home / "report.xml"
        command = [
            python or self.python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
            "-W",
            "ignore",
            "-p",
            TEXTS,
            f"--junitxml={report}",
        ]
        report.unlink(missing_ok=True)
        status = subprocess.run([*command, *arguments], cwd=folder, env=self.environment, check=False).returncode
        if status > 1 or not report.exists():  # neither all passed nor some failed
            print(f"\n{title}: pytest ended with status {status}", flush=True)
            return 1
        return table(title, report)


def table(title: str, report: Path) -> int:
    """Print how many cases of each file passed and failed; returns how many failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        texts = any(given.get("name") == "texts" and given.get("value") != "0" for given in case.iter("property"))
        outcome = "texts" if texts else "passed"
        outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), outcome)
        counts[case.get("classname", "")][outcome] += 1
    total = sum(counts.values(), Counter[str]())
    columns = ("passed", "texts", "failed", "skipped")
    print(f"\n{title:60} cases passed but-for-texts failed skipped")
    for name, count in [*sorted(counts.items()), ("together", total)]:
        print(f"{name:60} {count.total():5} {' '.join(f'{count[column]:6}' for column in columns)}", flush=True)
    return total["failed"]


def compare_forms(home: Path, theirs: Path) -> int:
    """Compare the form of each snapshot that was taken with the vendor's; returns how many lack something."""
    differing: dict[str, list[str]] = {}
    made = sorted((home / "integration").rglob("__snapshots__/*/*.json"))
    for path in made:
        vendor = theirs / path.relative_to(home / "integration")
        if vendor.exists():
            ours, expected = form(json.loads(path.read_text())), form(json.loads(vendor.read_text()))
            if missing := expected - ours:
                differing[str(vendor.relative_to(theirs))] = sorted(missing)
    print(f"\nsnapshots: {len(made)} taken, {len(differing)} lack what the vendor's have")
    for name, fields in differing.items():
        print(f"  {name}: {', '.join(fields)}")
    return len(differing)


def form(value: Any, path: str = "") -> frozenset[str]:
    """Every path of a JSON value that is not null, with its type; lists count as all their elements together."""
    if value is None:
        return frozenset()
    if isinstance(value, dict):
        return frozenset().union(*(form(inner, f"{path}.{key}") for key, inner in value.items()))
    if isinstance(value, list):
        return frozenset().union(*(form(inner, f"{path}[]") for inner in value))
    kind = "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
    return frozenset([f"{path}: {kind}"])


def ready(url: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until the server is healthy; returns its URL."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
            return url
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(home: Path) -> Iterator[str]:
    """A server of the demo model on loopback; its URL."""
    port, model = str(free_port()), home / "demo"
    shutil.copytree(DEMO, model)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": CONTEXT}))
    settings = {**dict.fromkeys(UNUSED, "0"), "CONTROL_PORT": port, "DATA_DIR": str(home / "data"), "THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "manage.py", "serve", str(model), "--port", port]
    named = {**os.environ, **{f"DRAGOMAN_{name}": value for name, value in settings.items()}}
    with (
        (home / "server.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=named, stdout=log, stderr=log) as process,
    ):
        try:
            yield ready(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            process.wait(STOP_S)


def shim(arguments: list[str]) -> int:
    """What `text-generation-launcher` does: load the adapters, then pass every connection on to the running server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lora-adapters", default="")
    options, _ = parser.parse_known_args(arguments)  # the others are about devices and the vendor's weights
    url = os.environ[URL]
    names = [name.partition("@")[0] for name in options.lora_adapters.split(",") if name]
    for name, path in zip(names, sorted(ADAPTERS.iterdir()), strict=False):
        body = json.dumps({"lora_name": name, "lora_path": str(path)}).encode()
        with contextlib.suppress(urllib.error.HTTPError):  # one that is loaded already is refused
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/load_lora_adapter", body)).close()
    asyncio.run(relay(options.port, int(url.rpartition(":")[2])))
    return 0


async def relay(port: int, target: int) -> None:
    """Pass the bytes of every connection to `port` on to `target`, and back."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(connected, "localhost", port) as listener:
        await listener.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
