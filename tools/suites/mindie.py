"""Runs MindIE's own clients, unmodified, against this server, and prints a table of what passed.

    python -m tools.suites.mindie CHECKOUT PYTHON [--only WORD] [--port 21200] [--show]

CHECKOUT is a working copy of github.com/Ascend/MindIE-Motor at the parent of commit 8bd5d97, the last one with the clients. PYTHON
is an interpreter that has their requirements (docs/mindie.md names versions). What runs: the test programs of the client
(`mindie_service/client`), the benchmark in each of its modes for HTTP (`mindie_service/tools/benchmark`), the probe script of a
pod, and the client of the node manager.

Nothing is written into CHECKOUT: all of it is copied into a temporary folder. The script never changes a program. It stands in for
what lies around them: `http_client_ctl`, a binary, by curl; the node manager's configuration; and a tokenizer's configuration that
older releases of transformers read. The benchmark's mode `triton_client` is left out: it speaks to another server, a backend of Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
MODEL = "llama_65b"
"""The name that the programs ask for."""
COPIED = {
    "client": "mindie_service/client",
    "benchmark": "mindie_service/tools/benchmark",
    "probe": "mindie_service/utils/http_client_ctl/scripts",
    "manager/node_manager": "mindie_service/management_service/node_health_management/node_manager",
}
START_S, STOP_S, CASE_S = 120, 45, 120
FAILED_IN_ITSELF = {"test_async_infer"}
"""It asks an HTTP response for `get`."""
ATTEMPTS = {"test_cancel_early": 5}
"""It stops a request of 20 tokens after the tenth; the demo model may have ended by then."""
CTL = '#!/bin/sh\nexec curl -sf -o /dev/null --max-time "$4" "http://127.0.0.1:$2$3"\n'
QUESTIONS = "gsm8k", "questions"
SAMPLED = '{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3'
ACCURACY = ("--TestAccuracy", "True")
# The test type, the kind, the data, further arguments.
BENCHMARKS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("client", "text", "questions", ACCURACY),
    ("client", "stream", "questions", ACCURACY),
    ("client", "stream", "questions", ("--ConfigPath", "managed.json")),
    ("client", "stream_token", "tokens.csv", ("--Tokenizer", "False")),
    (
        "tgi_client",
        "stream",
        "questions",
        ("--DoSampling", "True", "--SamplingParams", SAMPLED + ', "typical_p": 0.5}'),
    ),
    ("vllm_client", "stream", "synthetic", ()),
    ("vllm_client", "stream", "questions", ACCURACY),
    ("vllm_client", "stream", "questions", ("--SamplingParams", SAMPLED + ', "n": 2}', "--RequestRate", "5,10")),
    ("openai", "text", "synthetic", ()),
    ("openai", "text", "questions", ("--SamplingParams", SAMPLED + ', "n": 2}')),
    ("openai", "stream", "synthetic", ()),
    ("openai", "stream", "questions", ("--SamplingParams", SAMPLED + ', "logprobs": true, "top_logprobs": 2}')),
    ("openai", "stream", "questions", ACCURACY),
)
# The node manager's client without its configuration files and without its server, which needs more packages.
MANAGER = """
import sys, types
settings, server = types.ModuleType("node_manager.core.config"), types.ModuleType("node_manager.framework.server")
class GeneralConfig:
    http_server_config = {"tls_config": {"client_tls_enable": False}}
    def get_server_engine_ip(self): return "127.0.0.1"
    def get_server_engine_port_list(self): return [int(sys.argv[1])]
settings.GeneralConfig, server.Server, server.app = GeneralConfig, None, None
core = types.ModuleType("node_manager.core")
core.__path__ = []
sys.modules.update({"node_manager.core": core, settings.__name__: settings, server.__name__: server})
from node_manager.framework.client import Client
client = Client()
answer = client.get_ep_status(0) if sys.argv[2] == "status" else client.send_cmd_to_engine(0, int(sys.argv[2]))
print(answer)
assert answer["success"] and ("errors" if sys.argv[2] == "status" else "reason") in answer["data"], answer
"""


@dataclass(frozen=True)
class Case:
    """A program to run: it passes if it exits with 0 and says none of the words of a failure."""

    group: str
    name: str
    command: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    failed: tuple[str, ...] = ()


def main() -> int:
    """Start the server, run the cases, print the table; 1 if a case failed that does not fail in itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--only", default="", help="run the cases whose group or name has this word")
    parser.add_argument("--port", type=int, default=21200, help="the first of five ports")
    parser.add_argument("--show", action="store_true", help="print what failed cases said")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mindie-suite-") as folder:
        home = Path(folder)
        prepare(home, options.checkout.resolve(), options.port)
        server = start(home, options.port)
        try:
            chosen = [
                case
                for case in cases(home, options.python.absolute(), options.port)
                if options.only in f"{case.group} {case.name}"
            ]
            failed = [case for case in chosen if not attempt(case, options.show)]
        finally:
            server.terminate()
            server.wait(STOP_S)
    table(chosen, failed)
    return int(any(case.name not in FAILED_IN_ITSELF for case in failed))


def prepare(home: Path, checkout: Path, port: int) -> None:
    """Fill the temporary folder; the benchmark refuses files that others may read."""
    os.umask(0o027)
    for name, source in COPIED.items():
        shutil.copytree(checkout / source, home / name, copy_function=shutil.copyfile)
    shutil.copytree(DEMO, home / MODEL)
    tokenizer = home / "tokenizer"
    shutil.copytree(DEMO, tokenizer)
    described = json.loads((tokenizer / "tokenizer_config.json").read_text())
    kept = {key: described[key] for key in ("eos_token", "pad_token", "model_max_length") if key in described}
    write(tokenizer / "tokenizer_config.json", {**kept, "tokenizer_class": "PreTrainedTokenizerFast"})
    # What the programs read of a server's configuration; this server itself is configured by its environment.
    write(home / "conf" / "config.json", {"ServerConfig": {"managementPort": port + 3}, "BackendConfig": {"multiNodesInferEnabled": False}})  # fmt: skip
    work = home / "work"
    shipped = json.loads((home / "benchmark" / "mindiebenchmark" / "config" / "config.json").read_text())
    shipped["ServerConfig"]["ENABLE_MANAGEMENT"] = True
    write(work / "managed.json", shipped)
    lengths = {"Method": "uniform", "Params": {"MinValue": 1, "MaxValue": 20}}
    write(work / "synthetic.json", {"Input": lengths, "Output": lengths, "RequestCount": 6})
    (work / "tokens.csv").write_text("5,6,7\n8,9,10,11\n")
    (work / "questions").mkdir()
    lines = (json.dumps({"question": f"What is {i} plus 1?", "answer": f"It is\n#### {i + 1}"}) for i in range(4))
    (work / "questions" / "test.jsonl").write_text("\n".join(lines))
    binary = home / "bin" / "http_client_ctl"
    binary.parent.mkdir()
    binary.write_text(CTL)
    binary.chmod(0o750)


def write(path: Path, value: object) -> None:
    """Write JSON, with its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def start(home: Path, port: int) -> subprocess.Popen[bytes]:
    """Start `manage.py serve` with MindIE's planes on the third to fifth port, and wait until it is ready."""
    named = {
        **dict.fromkeys(("GRPC_PORT", "DJL_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT"), "0"),
        "FRONT_PORT": str(port), "CONTROL_PORT": str(port + 1), "MINDIE_PORT": str(port + 2),
        "MINDIE_MANAGEMENT_PORT": str(port + 3), "MINDIE_METRICS_PORT": str(port + 4),
        "DATA_DIR": str(home / "var"), "MODEL": str(home / MODEL), "THREADS": "1",
    }  # fmt: skip
    environment = {**os.environ, **{f"DRAGOMAN_{name}": value for name, value in named.items()}}
    environment["MINDIE_LLM_BENCHMARK_ENABLE"] = "1"  # the client reads batch sizes from chats
    log = home / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "manage.py", "serve"], cwd=ROOT, env=environment, stdout=written, stderr=written
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port + 3}/v2/health/ready", timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    server.kill()
    server.wait()
    raise SystemExit(log.read_text())


def cases(home: Path, python: Path, port: int) -> Iterator[Case]:
    """Every program."""
    url, management = f"http://127.0.0.1:{port + 2}", f"http://127.0.0.1:{port + 3}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(HOME=str(home / "work"), PYTHONDONTWRITEBYTECODE="1", MIES_INSTALL_PATH=str(home))
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    run = (str(python), "-W", "ignore")
    own = {**environment, "PYTHONPATH": str(home / "client"), "MINDIE_LOG_TO_STDOUT": "true"}
    for program in sorted((home / "client" / "mindieclient" / "python" / "test").glob("test_*.py")):
        command = (*run, str(program), "-u", url, "-mu", management)
        yield Case("client", program.stem, command, program.parent, own, ("Traceback", "[ERROR]", "failed!"))
    paths = os.pathsep.join((str(home / "client"), str(home / "benchmark")))
    tool = {**environment, "PYTHONPATH": paths, "MINDIE_LOG_TO_STDOUT": "benchmark:1; client:1"}
    for test, kind, data, more in BENCHMARKS:
        given = ("--SyntheticConfigPath", "synthetic.json") if data == "synthetic" else ("--DatasetPath", data)
        command = (
            *run, "-m", "mindiebenchmark.benchmark_run", "--Http", url, "--ManagementHttp", management, "--ModelPath",
            str(home / "tokenizer"), "--ModelName", MODEL, "--Concurrency", "4", "--WarmupSize", "1", "--MaxOutputLen", "12",
            "--TestType", test, "--TaskKind", kind, "--DatasetType", "synthetic" if data == "synthetic" else "gsm8k",
            *given, *more,
        )  # fmt: skip
        name = " ".join((test, kind, data, *(word for word in more if not word.startswith("--"))))
        yield Case("benchmark", name, command, home / "work", tool, ("Traceback", "[MIE01E"))
    pod = {**environment, "MINDIE_SERVER_PROBE_ONLY": "1", "APP_TYPE": "server", "POD_IP": "127.0.0.1"}
    for kind in ("startup", "readiness", "liveness"):
        yield Case("probe", kind, ("bash", str(home / "probe" / "probe.sh"), kind, "5"), home, pod)
    manager = {**environment, "PYTHONPATH": str(home / "manager")}
    for word in ("status", "0"):
        yield Case("manager", word, (*run, "-c", MANAGER, str(port + 3), word), home / "work", manager)


def attempt(case: Case, show: bool) -> bool:
    """Run a case as often as it may fail."""
    return any(passes(case, show) for _ in range(ATTEMPTS.get(case.name, 1)))


def passes(case: Case, show: bool) -> bool:
    """Run a case and print its outcome."""
    try:
        done = subprocess.run(
            case.command, cwd=case.folder, env=case.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=CASE_S, check=False,
        )  # fmt: skip
        said, passed = done.stdout, done.returncode == 0 and not any(word in done.stdout for word in case.failed)
    except subprocess.TimeoutExpired:
        said, passed = f"no end within {CASE_S} s\n", False
    print(f"{'passed' if passed else 'FAILED'}  {case.group}: {case.name}", flush=True)
    if show and not passed:
        print(said, flush=True)
    return passed


def table(chosen: list[Case], failed: list[Case]) -> None:
    """Print the number of cases, of passed and of failed ones for each group, and how many of these fail in themselves."""
    run, lost = Counter(case.group for case in chosen), Counter(case.group for case in failed)
    excused = Counter(case.group for case in failed if case.name in FAILED_IN_ITSELF)
    print(f"\n{'group':<10} {'cases':>6} {'passed':>7} {'failed':>7} {'of these in themselves':>23}")
    for group, count in run.items():
        print(f"{group:<10} {count:>6} {count - lost[group]:>7} {lost[group]:>7} {excused[group]:>23}")


if __name__ == "__main__":
    sys.exit(main())
