"""Runs Triton's own tests and clients, unmodified, against this server, and prints a table: cases, passed, failed.

    python -m tools.suites.triton CHECKOUT... [--python PYTHON] [--only WORD] [--log FOLDER]

Each CHECKOUT is a working copy of one of triton-inference-server's repositories `server`, `client` and `vllm_backend`.
Nothing is written into it: the folders of its tests are copied into a temporary folder, and `manage.py serve` takes the
place of `tritonserver`, with the demo model under the name that the tests use. They call the ports 8000 to 8002 by number;
`unshare -rn sh -c 'ip link set lo up; exec ...'` gives the command a network of its own. PYTHON is an interpreter with
pytest, `tritonclient[all]`, requests, psutil, sseclient-py, ml_dtypes and python-rapidjson.

Most tests of `server` ask models that echo or add tensors, which no language model can: their failures say nothing. This
script judges no failure, and never changes a test.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
ADAPTERS = ROOT / "models" / "demo-adapters"
START_S, STOP_S, FILE_S = 180, 60, 600
MEMORY_BYTES = 4 << 30
FRONT, GRPC, METRICS = 8000, 8001, 8002
OWN = {"GRPC_PORT": str(GRPC), "FRONT_PORT": str(FRONT), "CONTROL_PORT": "18080", "TRITON_SERVER_NAME": "triton",
       "TRITON_METRICS_PORT": str(METRICS)}  # fmt: skip
RAN = re.compile(r"^Ran (\d+) tests? in", re.MULTILINE)
FAILED = re.compile(r"^(?:FAIL|ERROR): (\S+ \(\S+\))", re.MULTILINE)
"""A failed case; one with several subtests, or whose teardown fails too, is written several times."""
SKIPPED = re.compile(r"skipped=(\d+)")
OFF = ("DJL_PORT", "MINDIE_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT")


@dataclass(frozen=True)
class Group:
    """One start of the server, and what runs against it.

    `folder`: the folder that is copied; a checkout without the first file has no such group. `tests`: files in it; a program is followed
    by its arguments, pytest's files by none. `stopped`: names of further deployments of the demo model, not started.
    `adapters`: names, each with a folder of the demo model's adapters. `environment`: the tests'. `settings`: the server's.
    """

    name: str
    folder: str
    model: str
    tests: tuple[str, ...]
    programs: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


QA_SIMPLE = (
    "L0_http/http_test.py",
    "L0_http/python_http_aio_test.py",
    "L0_http/http_client_plugin_test.py",
    "L0_http/http_request_many_chunks.py",
    "L0_http/http_input_size_limit_test.py",
    "L0_grpc/python_grpc_aio_test.py",
    "L0_grpc/grpc_client_plugin_test.py",
    "L0_logging/logging_endpoint_test.py",
    "L0_trace/trace_endpoint_test.py",
    "L0_input_validation/input_validation_test.py",
    "L0_metrics/metrics_config_test.py",
    "L0_shared_memory/shared_memory_test.py",
    "L0_nan_inf/nan_inf_test.py",
    "L0_decoupled/decoupled_test.py",
    "L0_server_status/server_status_test.py",
    "L0_response_statistics/response_statistics_test.py",
    "L0_request_cancellation/grpc_cancellation_test.py",
    "L0_http/http_restricted_api_test.py",  # unloads the model, as the next does
    "L0_grpc/python_unit_test.py",
)
EXAMPLES = (
    "health_metadata",
    "model_control",
    "infer_client",
    "async_infer_client",
    "aio_infer_client",
    "string_infer_client",
    "sequence_sync_infer_client",
    "shm_client",
    "shm_string_client",
)
GRPC_EXAMPLES = (
    "keepalive_client", "custom_args_client", "custom_repeat", "sequence_stream_infer_client", "aio_sequence_stream_infer_client",
)  # fmt: skip
REPEATS = {"TRITON_EXCLUDE_INPUT_IN_OUTPUT": "false"}
GROUPS = (
    Group(
        "vLLM's backend", "ci", "vllm_opt",
        (
            "L0_backend_vllm/vllm_backend/vllm_backend_test.py",
            "L0_backend_vllm/enabled_stream/enabled_stream_test.py",
            "L0_backend_vllm/request_cancellation/request_cancellation_test.py",
            "L0_backend_vllm/metrics_test/vllm_metrics_test.py",
            "L0_backend_vllm/accuracy_test/accuracy_test.py",
            "L0_check_health_vllm/check_health_test.py",
            "L0_additional_outputs_vllm/additional_outputs_test.py",
        ),
        stopped=("vllm_load_test", "add_sub", "ensemble_model"),
        settings=REPEATS,
    ),
    Group(
        "vLLM's backend with adapters", "ci", "vllm_llama_multi_lora",
        ("L0_multi_gpu_vllm/multi_lora/multi_lora_test.py",),
        adapters={"doll": "pirate", "sheep": "json"},
        environment={"SERVER_ENABLE_LORA": "true"},
    ),
    Group(
        "vLLM's backend, samples", "samples", "vllm_model", (),
        ("client.py", "client.py --streaming-mode --exclude-inputs-in-outputs", "client.py --exclude-inputs-in-outputs"),
    ),
    Group("generate", "qa", "mock_llm", ("L0_http/generate_endpoint_test.py",)),
    Group("server", "qa", "simple", QA_SIMPLE),
    Group("timeouts", "qa", "custom_identity_int32", (
        "L0_client_timeout/client_non_infer_timeout_test.py", "L0_client_timeout/client_infer_timeout_test.py",
    )),
    Group("parameters", "qa", "parameter", ("L0_parameters/parameters_test.py",)),
    Group(
        "clients", "src/python/examples", "simple", (),
        tuple(f"simple_{kind}_{name}.py" for kind in ("http", "grpc") for name in EXAMPLES)
        + tuple(f"simple_grpc_{name}.py" for name in GRPC_EXAMPLES)
        + ("grpc_client.py", "reuse_infer_objects_client.py", "memory_growth_test.py"),
    ),
    Group("client library", "src/python/library/tests", "simple", (
        "test_inference_server_client.py", "test_shared_memory.py",
    )),
)  # fmt: skip


@dataclass
class Row:
    """What one file did."""

    group: str
    file: str
    run: int = 0
    failed: int = 0
    skipped: int = 0


def main() -> int:
    """Run every group that the checkouts have; returns 0 whatever the tests say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the tests")
    parser.add_argument("--only", default="", help="run the files whose path contains this")
    parser.add_argument("--log", type=Path, help="a folder for the output of every file and of the servers")
    options = parser.parse_args()
    rows: list[Row] = []
    for group in GROUPS:
        first = Path(group.folder, (group.tests + group.programs)[0].split()[0])
        checkout = next((each for each in options.checkouts if (each / first).exists()), None)
        if checkout is not None and any(options.only in each for each in group.tests + group.programs):
            with tempfile.TemporaryDirectory(prefix="triton-suite-") as home:
                rows += run_group(group, checkout.resolve(), Path(home), options)
    print("\n| group | file | cases | passed | failed | skipped |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        passed = row.run - row.failed - row.skipped
        print(f"| {row.group} | {row.file} | {row.run} | {passed} | {row.failed} | {row.skipped} |")
    return 0


def run_group(group: Group, checkout: Path, home: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Start the server for a group, and run its files."""
    tests = home / "tests"
    shutil.copytree(checkout / group.folder, tests, symlinks=True)
    shutil.copytree(DEMO, home / group.model)
    log = (options.log or home).resolve()
    log.mkdir(parents=True, exist_ok=True)
    environment = settings(home, group.settings)
    if group.stopped:
        command(environment, "migrate")
    for name in group.stopped:
        for words in (("deploy", str(DEMO), "--name", name), ("stop", name)):
            command(environment, *words)
    adapters = [f"{name}={ADAPTERS / folder}" for name, folder in group.adapters.items()]
    extra = ["--lora-modules", *adapters] if adapters else []
    server_log = log / f"{group.name}.server.log"
    with server_log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "manage.py", "serve", "--model", str(home / group.model), *extra],
            cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until_ready(server, server_log)
            for line in group.tests + group.programs:
                if options.only in line:
                    yield run_file(group, line, tests, log, {"SERVER_PID": str(server.pid)}, options.python)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(STOP_S)


def command(environment: dict[str, str], *words: str) -> None:
    """Run a command of `manage.py` before the server starts."""
    subprocess.run([sys.executable, "manage.py", *words], cwd=ROOT, env=environment, check=True, capture_output=True)


def run_file(group: Group, line: str, tests: Path, log: Path, more: dict[str, str], python: str) -> Row:
    """Run one file, with pytest or as a program."""
    name, *arguments = line.split()
    path = tests / name
    row = Row(group.name, line)
    paths = [str(tests / "common"), str(path.parent)]
    environment = {
        **os.environ,
        **group.environment,
        **more,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    report = log / f"{name.replace('/', '.')}.xml"
    report.unlink(missing_ok=True)
    if line in group.programs:
        words = [python, path.name, *arguments]
    elif "unittest.main()" in path.read_text():  # as the vendor runs it; its base class does not work in pytest
        words = [python, path.name, "-v"]
    else:
        words = [python, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-q", "--tb=short",
                 f"--junitxml={report}", path.name]  # fmt: skip
    print(f"{group.name}: {line}", flush=True)
    written = log / f"{line.replace('/', '.').replace(' ', '')}.log"
    with written.open("w") as output:
        try:
            status = subprocess.run(
                words, cwd=path.parent, env=environment, stdout=output, stderr=output, timeout=FILE_S, check=False,
                preexec_fn=limit_memory,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = -1
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            row.run += int(suite.get("tests", 0))
            row.failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            row.skipped += int(suite.get("skipped", 0))
    elif (ran := RAN.search(text := written.read_text(errors="replace"))) is not None:
        row.run, row.failed = int(ran[1]), len(set(FAILED.findall(text)))
        row.skipped = sum(map(int, SKIPPED.findall(text, ran.end())))
    else:  # a program, or a file that does not even start
        row.run, row.failed = 1, int(status != 0)
    return row


def limit_memory() -> None:
    """Some tests send bodies of gigabytes, which this server refuses by their first bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def settings(home: Path, more: dict[str, str]) -> dict[str, str]:
    """The environment of the server."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    data = {"DATA_DIR": str(home / "data"), "THREADS": "1"}
    named = {**dict.fromkeys(OFF, "0"), **OWN, **data, **more}
    return {**given, **{f"DRAGOMAN_{name}": value for name, value in named.items()}}


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a model is ready; raises RuntimeError with the server's log."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{FRONT}/v2/health/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(log.read_text()[-4000:])


if __name__ == "__main__":
    sys.exit(main())
